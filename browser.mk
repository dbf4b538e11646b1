# Chromium, in which the page of `kvferry explain` is tested. Where it is missing and cannot be installed, those tests are skipped
# and say so.

.PHONY: browser

browser: ## Chromium from the system's packages, unless there is one
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	    if command -v $$name >/dev/null; then exit 0; fi; \
	  done; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo 'installing Chromium'; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 \
	      chromium fonts-dejavu-core; } >/dev/null 2>&1 || echo 'Chromium could not be installed: its tests are skipped'; \
	  else echo 'no Chromium, and no root to install it: its tests are skipped'; fi
