# Thin wrappers: the work is in scripts/ and the CMake presets.
.PHONY: setup build demo test bench format format-check lint

setup:
	@scripts/setup

build: setup
	@cmake --preset release
	@cmake --build --preset release

demo: build
	@scripts/demo

test: setup
	@scripts/test

bench: build
	@scripts/bench

format:
	@scripts/format

format-check:
	@scripts/format --check

lint: setup
	@scripts/lint
