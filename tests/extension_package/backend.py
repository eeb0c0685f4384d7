"""Builds the wheel of this folder with nothing but Python, so that tests need no network and no build tool."""

import base64
import hashlib
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).parent


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    module, version = project["name"].replace("-", "_"), project["version"]
    info = f"{module}-{version}.dist-info"
    points = [
        line
        for group, found in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in found.items()))
    ]
    files = {path.relative_to(HERE).as_posix(): path.read_bytes() for path in sorted((HERE / module).glob("*.py"))}
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "\n".join([*points, ""]).encode(),
    }
    record = [f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items()]
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    name = f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory) / name, "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
    return name


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
