# SPDX-License-Identifier: Apache-2.0
# make demo and make test are all that a fresh clone needs; each sets up .venv first (tools/setup says what it does).
.PHONY: help setup demo test lint format docs clean

help:
	@echo "make demo    set up, then train a mixture-of-experts model over 4 ranks (or all GPUs) beside one rank"
	@echo "make test    set up, then run every test that this machine can run"
	@echo "make lint    set up, then run the formatters' checks, linters and type checks"
	@echo "make format  set up, then format every source file"
	@echo "make docs    set up, then build the site in build/site"
	@echo "make clean   remove .venv and build"

setup:
	@tools/setup

demo: setup
	@.venv/bin/weft demo

test: setup
	@tools/run-tests

lint:
	@tools/setup lint
	@tools/lint

format:
	@tools/setup lint
	@tools/format

docs:
	@tools/setup docs
	@.venv/bin/python -m sphinx -q -b html docs build/site
	@echo "the site is build/site/index.html"

clean:
	rm -rf .venv build demo-out
