## make stages             climb the ladder: each stage is checked, then timed
## make stage-4            one stage beside the one before it
##                         N=1000 D=128 HEADS=3 BATCH=2 CAUSAL=1 ON=cpu SEED=7 JSON=1 choose what it runs on
## make diff-4             what stage 4 changes in stage 3: the lesson
## make trace-4            its memory accesses, watched on the CPU     (PICTURE=out.png draws them)
## make traffic            what each stage reads and writes
## make sanitize-4         NVIDIA's compute-sanitizer on it            (needs a GPU)
## make profile-4          NVIDIA's Nsight Compute on it               (needs a GPU)
## make bugs               the planted bugs, and what catches each
## make timings            measure this machine, and fill in the table of README.md
## make resources          registers, shared memory and spills of each kernel on seven architectures
## make notebooks          run all notebooks anew
## make lab                open them
## make test               all tests                                   (ARGS="-k tiled -x" goes to pytest)
## make doctor             what this machine has, what it lacks, and what would mend that
## make clean              remove what make built, .venv too
##
## make uses python3, or PYTHON=…, if it holds what is needed; else it builds a .venv of its own.

PYTHON ?= python3

# "ready", or the extra of pyproject.toml that this machine needs: cpu, cu12 or cu13
STATE := $(shell "$(PYTHON)" -m common.device 2>/dev/null)
ifeq ($(STATE),ready)
  PY := "$(PYTHON)"
else
  PY := .venv/bin/python
  READY := .venv/ready-$(if $(STATE),$(STATE),cpu)
endif
# For what must also work before the set-up
NOW := $(if $(READY),$(if $(wildcard $(READY)),$(PY),"$(PYTHON)"),$(PY))

STAGES := $(PY) -m stages
AS_JSON = $(if $(filter-out 0,$(JSON)),--json)
SHAPE = $(if $(N),--n $(N)) $(if $(D),--d $(D)) $(if $(HEADS),--heads $(HEADS)) $(if $(BATCH),--batch $(BATCH)) \
        $(if $(filter-out 0,$(CAUSAL)),--causal) $(if $(ON),--on $(ON)) $(if $(SEED),--seed $(SEED)) \
        $(AS_JSON)

.PHONY: help stages traffic timings bugs resources test notebooks lab doctor clean

help:
	@sed -n 's/^## \{0,1\}//p' Makefile
	@echo
	@$(NOW) -m stages list

stages: $(READY)
	@$(STAGES) run $(SHAPE) $(ARGS)

stage-%: $(READY)
	@$(STAGES) run $* $(SHAPE) $(ARGS)

diff-%: $(READY)
	@$(STAGES) diff $* $(ARGS)

trace-%: $(READY)
	@$(STAGES) trace $* $(SHAPE) $(if $(PICTURE),--picture "$(PICTURE)") $(ARGS)

sanitize-%: $(READY)
	@$(STAGES) sanitize $* $(SHAPE) $(ARGS)

profile-%: $(READY)
	@$(STAGES) profile $* $(SHAPE) $(ARGS)

traffic timings bugs: $(READY)
	@$(STAGES) $@ $(AS_JSON) $(ARGS)

resources: $(READY)
	@$(STAGES) resources --write $(ARGS)

test: $(READY)
	@if $(PY) -c 'import xdist' 2>/dev/null; then parallel='-n logical --maxprocesses 4 --dist loadgroup'; fi; \
	$(PY) -m pytest $$parallel $(ARGS)

notebooks: $(READY)
	@$(call have,nbclient)
	@$(PY) -m common.notebooks $(ARGS)

lab: $(READY)
	@$(call have,jupyterlab)
	@PYTHONPATH="$(CURDIR)" $(PY) -m jupyterlab notebooks/00_start_here.ipynb

have = $(PY) -c 'import $(1), ipykernel' 2>/dev/null || { echo 'Installing what notebooks need ...' >&2; \
	$(PY) -m common.device requirements notebooks | $(PY) -m pip install --quiet -r /dev/stdin; }

doctor:
	@$(NOW) -m stages doctor $(AS_JSON)

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted set-up starts afresh. A newer pyproject.toml brings the .venv up to date.
.venv/ready-%: pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || $(call fail,There is no $(PYTHON) here: install Python 3.11 or later.)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(call fail,Python 3.11 or later is needed \
	and $(PYTHON) is $$("$(PYTHON)" --version): name a newer one as in: make PYTHON=python3.12)
	@"$(PYTHON)" -c 'import venv; import ensurepip' 2>/dev/null || $(call fail,$(PYTHON) cannot make virtual environments: \
	install its venv module (Debian and Ubuntu: sudo apt-get install python3-venv).)
	@echo 'Setting up .venv for this folder, since $(PYTHON) does not hold what is needed. Once; it takes some minutes.' >&2
	@ls .venv/ready-* >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv
	@rm -f .venv/ready-*
	@"$(PYTHON)" -m common.device requirements $* dev >.venv/requirements.txt
	@{ .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -r .venv/requirements.txt && touch $@; } 2>&1 \
	| sed -n 's/^ *Downloading \([^-]*-[^-]*\)-.*\.whl \(.* [MG]B)\)/  \1 \2/p; s/^Installing.*/  installing .../p; /^ *[Ee][Rr][Rr][Oo][Rr]/p' >&2
	@test -f $@ || $(call fail,The set-up did not finish. The same command starts it afresh.)
	@echo >&2

fail = { echo "$(1)" >&2; exit 1; }
