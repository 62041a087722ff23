"""``wlb doctor``: what works in this environment, and with a model, before it costs GPU time."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from platform import python_version
from typing import Annotated, Any

import typer

from wlb import __version__
from wlb.cli import options
from wlb.cli.console import emit_json, show_columns, stderr, stdout
from wlb.errors import UserError
from wlb.integrations import environment
from wlb.terminal import wrapped

_SETTINGS = {  # their names, the first of which training sets, and its value
    "allocator": (("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"),
    "NCCL": ((environment.ORDER,), "1"),
}


def doctor(
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR", help="What each way of training says to this model (as for wlb check)."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Say what works in this environment, and what would be refused.

    Imports what is installed, each in a process of its own, and compares versions with those that were tested. Exits
    with status 1 if something would fail: a broken or unsuitable package, a setting, or the model everywhere.

    Example: wlb doctor --model llama3-8b
    """
    if model is not None:
        _check_exists(model)
    with stderr.status("importing what is installed"):
        packages = environment.find_packages()
        device = {} if "torch" not in packages or packages["torch"]["error"] else environment.find_gpus()
        routes = {} if model is None else _routes(model, packages)
    broken = (f"{name} {one['version']}: {one['error']}" for name, one in packages.items() if one["error"])
    seen = (*environment.wrong_versions(), *broken, *environment.wrong_gpus(device), *_untrained(routes))
    problems = [*dict.fromkeys(seen)]  # several extras need the same package
    found = {"wlb-llm": __version__, "python": python_version(), "device": device, "packages": packages}
    if json:
        emit_json(found | {"model": routes, "problems": problems})
    else:
        _show(found, model, routes, problems)
    if problems:
        raise typer.Exit(1)


def _routes(model: str, packages: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """For each way to use ``model`` here, why it would be refused; empty if it would not."""
    routes = {"wlb check": _refusal(_price, model)}
    if packages.get("torch", {"error": "absent"})["error"]:
        return routes
    routes["wlb train"] = _refusal(_configure, model)
    if Path(model).exists() and not packages.get("transformers", {"error": "absent"})["error"]:
        routes["transformers"] = _refusal(_pack, model)
    return routes


def _refusal(use: Callable[[str], None], model: str) -> str:
    try:
        use(model)
    except UserError as error:
        return str(error)
    except Exception as error:  # of transformers, which has many of its own
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _check_exists(model: str) -> None:
    if Path(model).exists():
        from wlb.workload.model_json import read_config_json

        read_config_json(Path(model))
    else:
        _price(model)


def _price(model: str) -> None:
    from wlb.workload import make_workload

    make_workload(model)


def _configure(model: str) -> None:
    from wlb.models.huggingface.config_json import read_config
    from wlb.models.transformer import check_built
    from wlb.workload import model_shape

    check_built(model_shape(model))
    if Path(model).exists():
        read_config(Path(model))


def _pack(model: str) -> None:
    """Raise ``UserError`` where packed documents of the Hugging Face model in a directory could mix."""
    import torch
    import transformers

    from wlb.integrations.huggingface.attention import objections_to_model, refuse

    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)  # without a question
    of_name = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        made = of_name._from_config(config) if of_name else transformers.AutoModelForCausalLM.from_config(config)
    refuse(objections_to_model(made))


def _untrained(routes: Mapping[str, str]) -> Iterator[str]:
    """The refusal of a model that no way of training takes or, without torch, that is not priced."""
    price, *ways = routes.values() if routes else [""]
    if all(ways or [price]):
        yield f"model: {price or ways[0]}"


def _show(found: Mapping[str, Any], model: str | None, routes: Mapping[str, str], problems: Iterable[str]) -> None:
    packages, device = found["packages"], found["device"]
    _line("versions", f"wlb-llm {found['wlb-llm']}, Python {found['python']}")
    _line("GPUs", _gpus(device) if device else "planning only, without torch")
    for what, (names, ours) in _SETTINGS.items() if device.get("gpus") else ():
        of_user = next((f"{name} = {device['settings'][name]}" for name in names if name in device["settings"]), None)
        _line(what, f"{of_user}, as you set it" if of_user else f"training sets {names[0]} = {ours}")
    kernels = [f"{name} {packages[name]['version']}" for name in environment.KERNELS if name in packages]
    _line("kernels", ", ".join(kernels) or "none installed")
    if stacks := {name: packages[name] for name in environment.STACKS if name in packages}:
        columns = {
            "stack": [*stacks],
            "version": [one["version"] for one in stacks.values()],
            "imports": ["fails" if one["error"] else "works" for one in stacks.values()],
            "tested with this version": [_tested(one) for one in stacks.values()],
        }
        show_columns(columns, words=columns)
    for way, refusal in routes.items():
        _line(way, f"{model}: refused: {refusal}" if refusal else f"{model}: works")
    for problem in problems:
        _line("problem", problem)


def _line(what: str, says: str) -> None:
    line = wrapped(f"{what:<14}{says}", stdout.width)
    stdout.print(line, soft_wrap=True)


def _gpus(device: Mapping[str, Any]) -> str:
    built = f"torch built for CUDA {device['cuda']}" if device["cuda"] else "torch built for CPUs"
    counted = Counter(device["gpus"])
    return f"{', '.join(f'{count} x {name}' for name, count in counted.items()) or 'none found'}; {built}"


def _tested(package: Mapping[str, Any]) -> str:
    """What of the table of tested stacks holds for the version installed."""
    by_result: dict[str, list[str]] = {}
    for feature, result in package["tested"].items():
        by_result.setdefault(result, []).append(feature)
    if by_result:
        said = "; ".join(f"{result}: {', '.join(features)}" for result, features in by_result.items())
        return said if package["ran"] else f"its pins, without it: {said}"
    if package["ran_in"]:
        return f"under the pins of {', '.join(package['ran_in'])}"
    others = ", ".join(package["tested_versions"])
    return f"nothing; {others} were" if others else "nothing"
