# SPDX-License-Identifier: Apache-2.0
"""Writes the schemas that examples/kubernetes is tested by, from the definitions of JobSet and LeaderWorkerSet.

Usage: python tools/kubernetes_schemas.py [--clones FOLDER]. Reads each definition at the release of ``SOURCES`` from
GitHub, or from FOLDER/jobset and FOLDER/lws, which are clones with that tag.

A definition has 10 000 lines. What is kept is the form of the fields that the example uses, and the names of those
beside them: enough to find a field that is misspelled, misplaced, missing or of another type. Rules in CEL are left
out. ``problems`` checks by such a schema.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES, SCHEMAS = ROOT / "examples/kubernetes", ROOT / "tests/samples/kubernetes"


@dataclass(frozen=True)
class Source:
    """Where the definition of a resource is from; both projects are under the Apache License 2.0."""

    repository: str
    release: str
    path: str


SOURCES = {
    "jobset": Source(
        "kubernetes-sigs/jobset", "v0.12.0", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
    ),
    "leaderworkerset": Source(
        "kubernetes-sigs/lws", "v0.9.0", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"
    ),
}


def read(source: Source, clones: Path | None) -> str:
    """Return the text of a definition."""
    if clones:
        folder = clones / source.repository.partition("/")[2]
        command = ["git", "-C", str(folder), "show", f"{source.release}:{source.path}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    address = f"https://raw.githubusercontent.com/{source.repository}/{source.release}/{source.path}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def schema_of(definition: dict[str, Any], version: str) -> dict[str, Any]:
    """Return the schema of one version of a resource."""
    versions = {one["name"]: one for one in definition["spec"]["versions"]}
    found: dict[str, Any] = versions[version]["schema"]["openAPIV3Schema"]
    return found


def reduced(schema: dict[str, Any], used: list[Any]) -> dict[str, Any]:
    """Return the part of a schema that values have to do with; ``others`` are the fields that none of them has."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": "integer or string"}
    kept = {key: schema[key] for key in ("type", "required", "enum", "pattern", "minimum") if key in schema}
    if "items" in schema:
        kept["items"] = reduced(schema["items"], [item for value in used for item in value])
    if "additionalProperties" in schema:
        values = [each for value in used for each in value.values()]
        kept["additionalProperties"] = reduced(schema["additionalProperties"], values)
    fields = schema.get("properties", {})
    if fields:
        names = {name for value in used for name in value if name in fields}
        kept["properties"] = {
            name: reduced(fields[name], [value[name] for value in used if name in value])
            for name in sorted(names)
        }
        kept["others"] = sorted(set(fields) - names)
    return kept


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "integer or string": (int, str),
}


def problems(value: Any, schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """Yield what a value has against a reduced schema, with the place of each."""
    unknown = set(schema) - {"type", "required", "enum", "pattern", "minimum"}
    unknown -= {"items", "additionalProperties", "properties", "others"}
    if unknown:
        raise ValueError(f"{at}: the schema has {', '.join(unknown)}, which this does not check")
    of_type = isinstance(value, TYPES[schema["type"]])
    if not of_type or (isinstance(value, bool) and schema["type"] != "boolean"):
        yield f"{at}: got {value!r}, allowed: {schema['type']}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{at}: got {value!r}, allowed: {', '.join(schema['enum'])}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: got {value!r}, allowed: {schema['pattern']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{at}: got {value!r}, allowed: {schema['minimum']} or more"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from problems(item, schema["items"], f"{at}[{number}]")
    elif isinstance(value, dict):
        yield from _problems_of_fields(value, schema, at)


def _problems_of_fields(value: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    for name in schema.get("required", []):
        if name not in value:
            yield f"{at}: {name} is missing"
    of_all = schema.get("additionalProperties")
    for name, field in value.items():
        place = f"{at}.{name}".lstrip(".")
        if of_all is not None:
            yield from problems(field, of_all, place)
        elif name in schema.get("properties", {}):
            yield from problems(field, schema["properties"][name], place)
        elif name in schema.get("others", []):
            yield f"{place}: the schema is older than this field of the example: run tools/kubernetes_schemas.py"
        elif "properties" in schema:
            yield f"{place}: there is no such field"


def main() -> None:
    """Write a schema for each example."""
    import yaml

    parser = argparse.ArgumentParser(description="Write the schemas that examples/kubernetes is tested by.")
    parser.add_argument("--clones", type=Path, help="a folder with clones named jobset and lws")
    clones = parser.parse_args().clones
    SCHEMAS.mkdir(parents=True, exist_ok=True)
    for name, source in SOURCES.items():
        example = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
        definition = yaml.safe_load(read(source, clones))
        version = example["apiVersion"].partition("/")[2]
        made = {
            "from": f"https://github.com/{source.repository}/blob/{source.release}/{source.path}",
            "license": "Apache-2.0",
            "made_by": "tools/kubernetes_schemas.py",
            "schema": reduced(schema_of(definition, version), [example]),
        }
        (SCHEMAS / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
