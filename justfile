# Recipes; CI runs `just test` through .ci/run, in the README's form.
set shell := ["bash", "-euo", "pipefail", "-c"]

uv := env("UV", "uv")

# list the recipes
default:
    @just --list

# format all code
fmt:
    {{uv}} run ruff format .
    {{uv}} run ruff check --fix .

# what reviewers should not have to say
lint:
    {{uv}} run ruff format --check .
    {{uv}} run ruff check .
    {{uv}} run lint-imports

# strict types
type:
    {{uv}} run mypy
    {{uv}} run mypy examples/*.py

# the default suite: under twelve minutes on two cores
test *args:
    {{uv}} run --locked pytest {{args}}

# one seed of the simulation
sim seed:
    {{uv}} run python -m jepsen_like sim --seeds 1 --seed {{seed}}

# fresh seeds for as long as one wishes
soak minutes="60":
    {{uv}} run python -m jepsen_like soak --minutes {{minutes}} --jobs 2

# figures side by side with Apache Kafka: docs/benchmarks.md
bench *args:
    {{uv}} run --group bench python -m benchmarks {{args}}

# a local cluster of three
cluster *args:
    {{uv}} run raftmq dev {{args}}
