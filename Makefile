SHELL := /bin/bash
# The front door. Each recipe is one script in scripts/, so that it can be read, run alone and tested.

.DEFAULT_GOAL := help
.PHONY: help build run test check bench soak fuzz image install deb schemathesis clean advisories

export PREFIX DESTDIR UNITDIR BOOTS TARGET SECONDS_EACH

help: ## what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | while IFS="$$(printf '\t')" read -r name what; do printf '  make %-11s %s\n' "$$name" "$$what"; done

build: ## build the programs into target/pepo/bin
	@scripts/prepare.sh run
	@scripts/build.sh

run: ## run an agent in a microVM of its own, from nothing, and leave a clean host
	@scripts/run.sh

test: ## every test, on real microVMs too (takes root)
	@scripts/test.sh

check: ## format, lints, walls, licences, documentation
	@scripts/check.sh

bench: ## the figures, as ratios measured in one run (release build)
	@scripts/bench.sh

soak: ## many boots in a row (BOOTS=200), and what takes too long for `make test`
	@scripts/soak.sh

fuzz: ## the fuzz targets, a minute each (TARGET=, SECONDS_EACH=)
	@scripts/fuzz.sh

image: ## build the default Image in the development instance
	@scripts/prepare.sh run
	@scripts/build.sh
	@scripts/image.sh base

install: ## programs, systemd units and users (PREFIX=/usr/local, DESTDIR=)
	@scripts/install.sh

deb: ## a Debian package of a release build
	@scripts/deb.sh

schemathesis: ## the API against its own document, every check (takes root)
	@scripts/build.sh
	@scripts/schemathesis.sh

clean: ## remove the build and the development instance
	@scripts/clean.sh

advisories: ## known vulnerabilities of dependencies (needs the network: the database is on GitHub)
	@scripts/prepare.sh check
	@. scripts/say.sh && "$$tools/cargo-deny-$$deny_version/bin/cargo-deny" --locked check advisories
