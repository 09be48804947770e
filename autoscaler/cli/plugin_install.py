"""`autoscaler plugin-install`: the plugin for vLLM into a directory that is to be on its PYTHONPATH."""

import base64
import hashlib
import shutil
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import click

import autoscaler.vllm_plugin as plugin

PACKAGE = "vllm_autoscaler_plugin"


@click.command("plugin-install")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def command(directory: Path) -> int:
    """Copy the plugin for vLLM into DIRECTORY, with the metadata by which vLLM finds it.

    For the init container of an engine's pod: DIRECTORY is a volume that both containers mount, and that is on the
    PYTHONPATH of vLLM's container. See docs/batching.md.
    """
    try:
        count = install(directory)
    except OSError as error:
        raise click.ClickException(f"cannot write to {directory}: {error.strerror}") from error
    click.echo(f"{PACKAGE} {plugin.__version__}: {count} files in {directory}")
    return 0


def install(directory: Path) -> int:
    """Write the plugin's modules and its metadata, and return how many files. An older one there is replaced.

    Raises: OSError.
    """
    for old in directory.glob(f"{PACKAGE}-*.dist-info"):
        shutil.rmtree(old)
    contents = dict(distribution())
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return len(contents)


def distribution() -> Iterator[tuple[str, bytes]]:
    """Yield the files of the installed distribution, as a wheel of the same version would unpack them."""
    source = files("autoscaler.vllm_plugin")
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    metadata = f"{PACKAGE}-{plugin.__version__}.dist-info"
    contents = {f"{PACKAGE}/{file.name}": file.read_bytes() for file in source.iterdir() if file.name.endswith(".py")}
    contents[f"{metadata}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {plugin.__version__}\n"
        f"Summary: {project['description']}\nRequires-Python: {project['requires-python']}\n"
    ).encode()
    contents[f"{metadata}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: autoscaler\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    contents[f"{metadata}/entry_points.txt"] = entry_points(project["entry-points"]).encode()
    yield from contents.items()
    yield f"{metadata}/RECORD", record(contents, f"{metadata}/RECORD").encode()


def entry_points(groups: dict[str, dict[str, str]]) -> str:
    """Return the text of `entry_points.txt`."""
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(entries.items()))
        for group, entries in sorted(groups.items())
    ]
    return "\n".join(sections)


def record(contents: dict[str, bytes], own: str) -> str:
    """Return the text of `RECORD`: every file with its digest and size, and the record itself without."""
    lines = []
    for name, content in sorted(contents.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{own},,\n"])
