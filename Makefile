# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all pytest test-torch stacks slowest equivalence rehearsal lint setup peers figures docs site release-check clean

# Installs once, and again whenever the dependencies change.
$(VENV)/.installed: pyproject.toml studies/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,test]' --editable './studies[page]'
	@touch $@

setup: $(VENV)/.installed

# The demo needs less: neither Arrow and TensorBoard nor what tests are run with.
$(VENV)/.demo: pyproject.toml studies/pyproject.toml constraints.txt
	@test -f $(VENV)/.installed || echo '[0/4] installing torch, tokenizers and matplotlib into $(VENV), which takes a minute or two'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@test -f $(VENV)/.installed || $(BIN)/pip install --no-compile --disable-pip-version-check \
	  --constraint constraints.txt --editable . --editable ./studies torch safetensors tokenizers
	@touch $@

# Lint runs beside the tests; make fails where either does.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

# Also the tests marked `exhaustive`, which repeat on more cases what others prove, and more random examples.
test-all: setup
	@$(MAKE) --no-print-directory --jobs 2 lint pytest CHOSEN='-m "" --hypothesis-profile exhaustive'

# Three at a time on two cores: some wait for processes. Threads of one process would only wait for each other. Without
# bytecode on the disk every process would compile all modules anew.
ENVIRONMENT := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1
PYTEST := $(ENVIRONMENT) $(BIN)/pytest -n 3 --dist worksteal

pytest: setup
	$(PYTEST) $(CHOSEN)

# The suite on another torch: make test-torch VERSION=2.14.1 [TESTS='tests/attention tests/integrations'].
# The environment is its own, with every other dependency as pinned; the registry's builds of torch bring CUDA along.
TESTS ?= tests studies/tests
test-torch:
	@test -n '$(VERSION)' || { echo 'name the torch: make test-torch VERSION=2.14.1'; exit 2; }
	test -d .venv-torch-$(VERSION) || $(PYTHON) -m venv .venv-torch-$(VERSION)
	grep -v '^torch==' constraints.txt > .venv-torch-$(VERSION)/constraints.txt
	.venv-torch-$(VERSION)/bin/pip install --quiet --disable-pip-version-check \
	  --constraint .venv-torch-$(VERSION)/constraints.txt 'torch==$(VERSION)' --editable '.[all,test]' --editable ./studies
	$(ENVIRONMENT) .venv-torch-$(VERSION)/bin/pytest -n 3 --dist worksteal $(TESTS)

# The integrations under the pins of each front end, and the table of which features are exact there:
# make stacks [STACKS='TRL Axolotl'] [TORCHTITAN=DIR] [MEGATRON=DIR], with checkouts of their mains.
stacks: setup
	$(BIN)/python scripts/stacks.py $(STACKS) $(if $(TORCHTITAN),--torchtitan $(TORCHTITAN)) $(if $(MEGATRON),--megatron $(MEGATRON))

# All tests, and at the end which took longest: calls, setups and teardowns, each for itself.
slowest: setup
	$(PYTEST) -m "" --durations 20

# Loss and gradients in every layout of up to 8 processes, those of level steps, and 20 steps of every preset, against single
# documents.
equivalence: setup
	$(BIN)/pytest tests/training/test_equivalence.py tests/training/test_steps_equivalence.py -m "" --all-layouts --timeout 18000

# Jobs of 32 and 64 processes, which lose a node and go on without it; 8 GiB, and half an hour on two cores.
rehearsal: setup
	$(BIN)/pytest tests/training/test_rehearsal.py -m ""

# Every figure of README and of the docs that takes long, and the tables that show them: many hours on two
# cores, but an interrupted run continues. Then the demo, and the pictures.
figures: setup
	$(BIN)/python scripts/figures.py $(RESULTS)
	$(BIN)/python -m benchmarks.demo
	$(BIN)/python scripts/pictures.py

docs: setup
	$(BIN)/python scripts/configuration_reference.py

# The documentation as a site, in site/; a warning or a link that leads nowhere fails.
site:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

# Wheel and sdist in dist/: what they contain, how they look to an index, and that they work in an empty environment.
release-check:
	rm -rf dist dist-venv
	$(PYTHON) -m venv dist-venv
	dist-venv/bin/pip install --quiet --disable-pip-version-check build twine check-wheel-contents
	dist-venv/bin/python -m build --quiet
	dist-venv/bin/python -m build --quiet --outdir dist studies
	dist-venv/bin/twine check --strict dist/*
	dist-venv/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv --clear dist-venv
	dist-venv/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd dist && ../dist-venv/bin/wlb --help > /dev/null && ../dist-venv/bin/wlb-studies --help > /dev/null
	test -f dist-venv/share/wlb/configs/7b_128k.toml
	cd dist && ../dist-venv/bin/wlb-studies packing synthetic:5000:32K:0 --context-window 32K --micro-batches 4 --steps 4
	dist-venv/bin/pip install --quiet --disable-pip-version-check uv
	dist-venv/bin/pip download --quiet --disable-pip-version-check --dest dist-venv/wheels dist/wlb_llm-*.whl
	@size=$$(du -sm dist-venv/wheels | cut -f 1); echo "wheels of a planner without torch: $$size MB"; test $$size -le 60
	cd dist && ../dist-venv/bin/python -c "import json; json.dump([90, 7000, 30000] * 900, open('lengths.json', 'w'))"
	cd dist && ../dist-venv/bin/uvx --offline --find-links ../dist-venv/wheels --from wlb_llm-*.whl wlb check lengths.json --gpus 8
	cd dist && ../dist-venv/bin/python -c "import wlb; print(wlb.make_shard_plan([7, 3], 2, 'per_document').positions(0))"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: $(VENV)/.demo
	@$(BIN)/python -m benchmarks.demo

# A second environment with the packers that studies.benchmarks.packing compares ours with.
peers:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[data,train]' --editable ./studies
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement studies/benchmarks/requirements-peers.txt

clean:
	rm -rf $(VENV) .venv-peers .venv-torch-* .venv-stacks .venv-docs dist dist-venv site runs results demo
