# SPDX-License-Identifier: Apache-2.0
"""The examples for Kubernetes are of the form that the definitions of JobSet and LeaderWorkerSet ask for, and say one
thing: what starts ranks fits the number of pods and GPUs, and the settings are Weft's."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft import _core

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import kubernetes_schemas  # noqa: E402

NAMES = sorted(kubernetes_schemas.SOURCES)


def example(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / f"examples/kubernetes/{name}.yaml").read_text())
    return loaded


def schema(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((kubernetes_schemas.SCHEMAS / f"{name}.json").read_text())
    source = kubernetes_schemas.SOURCES[name]
    assert made["from"] == f"https://github.com/{source.repository}/blob/{source.release}/{source.path}"
    found: dict[str, Any] = made["schema"]
    return found


def pods(name: str) -> tuple[dict[str, Any], int]:
    """Return what describes a pod, and the number of pods that are one job."""
    spec = example(name)["spec"]
    if name == "leaderworkerset":
        return spec["leaderWorkerTemplate"]["workerTemplate"]["spec"], spec["leaderWorkerTemplate"]["size"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"]
    return job["template"]["spec"], job["completions"]


def test_every_example_has_a_schema() -> None:
    assert sorted(path.stem for path in (ROOT / "examples/kubernetes").glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_of_the_form_of_their_definitions(name: str) -> None:
    assert list(kubernetes_schemas.problems(example(name), schema(name))) == []


def _misspelled(spec: dict[str, Any]) -> None:
    spec["networks"] = spec.pop("network")


def _of_another_type(spec: dict[str, Any]) -> None:
    spec["replicatedJobs"][0]["template"]["spec"]["completions"] = "2"


def _truth_for_a_number(spec: dict[str, Any]) -> None:
    spec["failurePolicy"]["maxRestarts"] = True


def _missing(spec: dict[str, Any]) -> None:
    del spec["replicatedJobs"][0]["name"]


def _misplaced(spec: dict[str, Any]) -> None:
    spec["replicatedJobs"][0]["template"]["spec"]["containers"] = []


def _newer(spec: dict[str, Any]) -> None:
    spec["suspend"] = False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_misspelled, "spec.networks: there is no such field"),
        (_of_another_type, "spec.replicatedJobs[0].template.spec.completions: got '2', allowed: integer"),
        (_truth_for_a_number, "spec.failurePolicy.maxRestarts: got True, allowed: integer"),
        (_missing, "spec.replicatedJobs[0]: name is missing"),
        (_misplaced, "spec.replicatedJobs[0].template.spec.containers: there is no such field"),
        (_newer, "spec.suspend: the schema is older"),
    ],
)
def test_a_mistake_is_found_by_its_place(change: Callable[[dict[str, Any]], None], said: str) -> None:
    changed = copy.deepcopy(example("jobset"))
    change(changed["spec"])
    (found,) = kubernetes_schemas.problems(changed, schema("jobset"))
    assert found.startswith(said)


def test_a_schema_with_a_word_that_is_not_checked_is_refused() -> None:
    with pytest.raises(ValueError, match="maxLength"):
        list(kubernetes_schemas.problems("x", {"type": "string", "maxLength": 1}))


@pytest.mark.parametrize(
    ("value", "said"),
    [("B", "allowed: a, c"), ("b", "allowed: a, c"), (3, "allowed: string")],
)
def test_values_outside_of_a_list_are_found(value: object, said: str) -> None:
    (found,) = kubernetes_schemas.problems(value, {"type": "string", "enum": ["a", "c"]}, "x")
    assert said in found


def test_what_is_reduced_keeps_the_form_of_what_is_used_and_the_names_of_the_rest() -> None:
    text = {"type": "string", "description": "long"}
    whole = {
        "type": "object",
        "required": ["a"],
        "properties": {
            "a": {"type": "array", "items": {"type": "object", "properties": {"x": text, "y": text}}},
            "b": {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}},
            "c": text,
        },
    }
    kept = kubernetes_schemas.reduced(whole, [{"a": [{"x": "1"}], "b": {"k": 1}}])
    assert kept == {
        "type": "object",
        "required": ["a"],
        "properties": {
            "a": {
                "type": "array",
                "items": {"type": "object", "properties": {"x": {"type": "string"}}, "others": ["y"]},
            },
            "b": {"type": "object", "additionalProperties": {"type": "integer or string"}},
        },
        "others": ["c"],
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_command_fits_pods_gpus_and_volumes(name: str) -> None:
    pod, number = pods(name)
    (container,) = pod["containers"]
    (script,) = container["args"]
    limits = container["resources"]["limits"]
    assert f"--nproc-per-node {limits['nvidia.com/gpu']} " in script
    assert f"--nnodes {number} " in script or "--nnodes $LWS_GROUP_SIZE " in script
    assert "--node-rank $" in script and "--master-addr " in script
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    known = {row[0] for row in _core.config_table()}
    assert {variable["name"] for variable in container["env"]} <= known
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]


def test_ranks_of_the_jobset_meet_at_its_first_pod() -> None:
    job = example("jobset")
    spec, name = job["spec"], job["metadata"]["name"]
    pod, _ = pods("jobset")
    (place,) = re.findall(r"--master-addr (\S+)", pod["containers"][0]["args"][0])
    assert place == f"{name}-{spec['replicatedJobs'][0]['name']}-0-0.{name}"
    assert spec["network"]["enableDNSHostnames"] is True
