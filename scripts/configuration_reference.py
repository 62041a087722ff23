"""Write docs/configuration.md from the schema in ``wlb.job.config``: each key, its default or type, and its meaning.

    .venv/bin/python scripts/configuration_reference.py [--check]

With ``--check`` nothing is written; exit status 1 says that the page is out of date.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from wlb.job.config import PRESETS, JobConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEADER = """# Configuration reference

For whoever writes a job: every setting of its TOML file, with its default and its meaning. Only `data.store`, or
`[[data.mixture]]` instead, is required. `--set training.steps=20` changes one setting for a run.

Brackets hold the default (**bold** among several values) or the type. Token counts may have a binary unit: `"128K"` is
131,072. Relative paths start at the working directory. Unknown keys are refused.
"""


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
    layout = sections["parallel"]["properties"]  # [baseline] has the same keys
    parts = [HEADER, _preset_section(properties["preset"])]
    parts += [
        _section(name, definition, schema, {} if name == "parallel" else layout)
        for name, definition in sections.items()
    ]
    return "\n".join(parts)


def _preset_section(entry: dict[str, Any]) -> str:
    lines = ["## preset\n", f"{entry['description']}. Default: `{entry['default']}`.\n"]
    for name, sections in PRESETS.items():
        settings = [f"`{s}.{k}={json.dumps(v)}`" for s, values in sections.items() for k, v in values.items()]
        lines.append(f"- `{name}`: {', '.join(settings) or 'the defaults below'}")
    return "\n".join(lines) + "\n"


def _section(name: str, definition: dict[str, Any], schema: dict[str, Any], layout: dict[str, Any]) -> str:
    lines = [f"## [{name}]\n", f"{definition['description']}\n"]
    required = definition.get("required", ())
    if repeated := [f"`{key}`" for key, entry in definition["properties"].items() if layout.get(key) == entry]:
        lines.append(f"- {', '.join(repeated)}: as in [parallel]")
    for key, entry in sorted(definition["properties"].items(), key=lambda item: "defaults" in item[1]):
        if layout.get(key) == entry:
            continue
        value = f"required, {_type(entry)}" if key in required else _default(entry)
        lines.append(f"- `{key}` ({value}): {entry.get('description', '')}")
    nested = [
        _section(f"{name}.{key}", _definition(option, schema), schema, layout)
        for key, entry in definition["properties"].items()
        for option in (*entry.get("anyOf", ()), entry.get("items", {}))
        if "$ref" in option
    ]
    return "\n".join(["\n".join(lines) + "\n", *nested])


def _definition(entry: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    options = (entry, *entry.get("anyOf", ()))  # a section may be optional
    reference = next(option["$ref"] for option in options if "$ref" in option)
    definition: dict[str, Any] = schema["$defs"][reference.rpartition("/")[2]]
    return definition


def _default(entry: dict[str, Any]) -> str:
    """The default, in bold where a setting is one of several values, or else the type; by packer for their options."""
    kind, default = _type(entry), _value(entry.get("default"))
    packers_with: dict[str, list[str]] = {}
    for packer, value in entry.get("defaults", {}).items():
        packers_with.setdefault(_value(value), []).append(packer)
    if packers_with:
        defaults = [f"{', '.join(packers)}{value and f': {value}'}" for value, packers in packers_with.items()]
        return "; ".join([kind, *defaults] if _choices(entry) or "" in packers_with else defaults)
    if default and _choices(entry):
        return kind.replace(default, f"**{default}**")
    return default or kind


def _choices(entry: dict[str, Any]) -> list[str]:
    """The values that a setting is one of."""
    options = [choice for option in entry.get("anyOf", ()) for choice in _choices(option)]
    return options + [_value(value) for value in entry.get("enum", [entry["const"]] if "const" in entry else [])]


def _value(value: object) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _type(entry: dict[str, Any]) -> str:
    if "$ref" in entry:
        return "table, below"
    if "anyOf" in entry:
        return " or ".join(text for option in entry["anyOf"] if (text := _type(option)))
    if choices := _choices(entry):
        return ", ".join(choices)
    if entry.get("type") == "null":
        return ""
    if entry.get("type") == "array":
        return f"list of {_type(entry['items'])}" if "items" in entry else "list"
    names = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
    return str(entry["format"]) if entry.get("format") in ("path", "tokens") else names[entry["type"]]


if __name__ == "__main__":
    sys.exit(main())
