# A wheel and an sdist, and each of them tried in a fresh virtual environment: alone, and beside vLLM, to which the connector is
# then known by its name. The environment beside vLLM sees the packages of the engines' environment.

.PHONY: dist

define BESIDE_VLLM
import pathlib, sys
import kvferry
assert pathlib.Path(kvferry.__file__).is_relative_to(sys.prefix), kvferry.__file__
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
named = KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both")
found = KVConnectorFactory.get_connector_class(named)
print("vLLM knows", found.__name__, "of kvferry", kvferry.__version__)
endef
export BESIDE_VLLM

dist: setup vllm-venv ## a wheel and an sdist in dist/, tried in fresh virtual environments
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	@set -e; place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; here=$$PWD; \
	get() { "$$@" >"$$place/pip.log" 2>&1 || { cat "$$place/pip.log"; return 1; }; }; pip='-m pip install --disable-pip-version-check'; \
	for made in dist/*.whl dist/*.tar.gz; do \
	  echo "$$made in a fresh environment"; \
	  rm -rf "$$place/alone"; $(PYTHON) -m venv "$$place/alone"; \
	  get "$$place/alone/bin/python" $$pip "$$here/$$made"; \
	  (cd "$$place" && alone/bin/kvferry --version && alone/bin/python -m kvferry verify --model lfm2-1.2b --tp 1,2 --pp 1); \
	done; \
	echo "kvferry[nixl] beside vLLM"; \
	'$(VLLM_VENV)/bin/python' -m venv "$$place/engine"; \
	seen=$$('$(VLLM_VENV)/bin/python' -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "$$seen" > "$$("$$place/engine/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engines.pth"; \
	get "$$place/engine/bin/python" $$pip "kvferry[nixl] @ file://$$here/$$(ls dist/*.whl)"; \
	(cd "$$place" && engine/bin/python -c "$$BESIDE_VLLM" 2>/dev/null && engine/bin/kvferry demo --requests 20)
