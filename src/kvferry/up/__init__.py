"""One command that serves: prefill engines, decode engines and a router on this machine, watched and ended together.

`engines` says what is wanted, `machine` what each engine gets of the machine, `commands` what is run; these are pure. `watch`
looks at processes, `harbour` runs them through a `supervisor`, `view` shows them.
"""
