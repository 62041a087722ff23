"""Write docs/configuration.md from the schema in ``wlb.job.config``: each key, its type, default and bounds.

    .venv/bin/python scripts/configuration_reference.py [--check]

With ``--check`` nothing is written; exit status 1 says that the page is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from wlb.job.config import PRESETS, JobConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEADER = """# Configuration reference

Generated from the schema in `src/wlb/job/config.py` by `scripts/configuration_reference.py`; do not edit.

A job is a TOML file; `wlb train CONFIG --set section.key=value` changes a setting for one run, `--set preset=NAME` the
preset. Unknown sections and keys are refused, relative paths are relative to the working directory. Only `data.store`,
or `[[data.mixture]]` in its place, has no default. Numbers of tokens are integers, or text with a binary unit: `"128K"`
is 131,072 and `"1M"` is 1,048,576.
"""

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
LARGEST_SHOWN = 2**31 - 1  # the width of an integer is no news to the reader


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    check: bool = parser.parse_args().check
    text = reference()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"docs/{PAGE.name} is out of date; run scripts/configuration_reference.py", file=sys.stderr)
    return 1


def reference() -> str:
    """The page, in Markdown."""
    schema = JobConfig.model_json_schema()
    properties: dict[str, Any] = schema["properties"]
    sections = {name: _definition(entry, schema) for name, entry in properties.items() if name != "preset"}
    parts = [HEADER, _preset_section(properties["preset"])]
    parts += [_section(name, definition, schema) for name, definition in sections.items()]
    return "\n".join(parts)


def _preset_section(entry: dict[str, Any]) -> str:
    lines = ["## preset\n", f"{entry['description']}. Default: `{entry['default']}`.\n"]
    lines += ["| Preset | Sets |", "| --- | --- |"]
    for name, sections in PRESETS.items():
        settings = [f"`{s}.{k} = {json.dumps(v)}`" for s, values in sections.items() for k, v in values.items()]
        lines.append(f"| `{name}` | {', '.join(settings) or 'nothing: the defaults below'} |")
    return "\n".join(lines) + "\n"


def _section(name: str, definition: dict[str, Any], schema: dict[str, Any]) -> str:
    lines = [f"## [{name}]\n", f"{definition['description']}\n"]
    lines += ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    required = definition.get("required", ())
    for key, entry in sorted(definition["properties"].items(), key=lambda item: "defaults" in item[1]):
        default = "required" if key in required else _default(entry)
        lines.append(f"| `{key}` | {_type(entry, schema)} | {default} | {entry.get('description', '')} |")
    nested = [
        _section(f"{name}.{key}", _definition(option, schema), schema)
        for key, entry in definition["properties"].items()
        for option in (*entry.get("anyOf", ()), entry.get("items", {}))
        if "$ref" in option
    ]
    return "\n".join(["\n".join(lines) + "\n", *nested])


def _definition(entry: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    definition: dict[str, Any] = schema["$defs"][entry["$ref"].rpartition("/")[2]]
    return definition


def _default(entry: dict[str, Any]) -> str:
    """The default; of a packer's option, that of each packer which has it."""
    by_packer: dict[str, Any] = entry.get("defaults", {})
    if not by_packer:
        return _value(entry.get("default"))
    packers_with: dict[str, list[str]] = {}
    for packer, value in by_packer.items():
        packers_with.setdefault(_value(value), []).append(packer)
    return "; ".join(f"{value} ({', '.join(packers)})".strip() for value, packers in packers_with.items())


def _value(value: object) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _type(entry: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in entry:
        return "table, below"
    if "anyOf" in entry:
        return " or ".join(text for option in entry["anyOf"] if (text := _type(option, schema)))
    if "enum" in entry:
        return ", ".join(f"`{json.dumps(value)}`" for value in entry["enum"])
    if "const" in entry:
        return f'`"{entry["const"]}"`'
    if entry.get("type") == "null":
        return ""
    if entry.get("type") == "array":
        items = entry.get("prefixItems")
        return f"{len(items)} of: {_type(items[0], schema)}" if items else f"list of: {_type(entry['items'], schema)}"
    names = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
    name = entry["format"] if entry.get("format") in ("path", "tokens") else names[entry["type"]]
    bounds = [f"{sign} {entry[key]:g}" for key, sign in BOUNDS.items() if key in entry and entry[key] < LARGEST_SHOWN]
    return " ".join([name, *bounds])


if __name__ == "__main__":
    sys.exit(main())
