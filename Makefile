# SPDX-License-Identifier: Apache-2.0
# make demo and make test are all that a fresh clone needs. Each first installs the system's packages it needs (as root,
# on Debian or Ubuntu; otherwise, and with PACKAGES=no, it lists them) and sets up .venv; tools/packages and tools/setup
# say what they do.
.PHONY: help setup demo demo-two-machines test test-rdma lint format docs clean

help:
	@echo "make demo    set up, then train a mixture-of-experts model over 4 ranks (or all GPUs) beside one rank"
	@echo "make demo-two-machines    the same over two network namespaces of two ranks (root), or two nodes of this host"
	@echo "make test    set up, then run every test that this machine can run; TESTS=tests/unit runs those alone"
	@echo "make test-rdma    set up, then run what needs a real RDMA stack between two guests under QEMU; RDMA=quick: two minutes of it"
	@echo "make lint    set up, then run the formatters' checks, linters and type checks"
	@echo "make format  set up, then format every source file"
	@echo "make docs    set up, then build the site in build/site"
	@echo "make clean   remove .venv and build"

setup:
	@tools/packages build
	@tools/setup wheel

demo: setup
	@.venv/bin/weft demo

demo-two-machines: setup
	@.venv/bin/weft demo --nodes 2

test:
	@tools/packages test
	@tools/setup wheel
	@tools/run-tests $(TESTS)

test-rdma:
	@tools/packages rdma
	@tools/setup wheel
	@tools/rdma-test $(RDMA)

lint:
	@tools/packages build
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
