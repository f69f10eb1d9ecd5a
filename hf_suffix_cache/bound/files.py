"""JSON on disk with a version and a checksum, written whole or not at all."""

import hashlib
import json
import os
import uuid
from pathlib import Path

FORMAT = "hf_suffix_cache calibration"
VERSION = 1


def write(path, data: dict) -> None:
    """Write `data` to `path`, atomically: a reader sees the old file or the new one, also if writing fails."""
    path = Path(path)
    document = {"format": FORMAT, "version": VERSION, "sha256": _checksum(data), "calibration": data}
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # beside it: a rename must not cross disks
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path) -> dict:
    """The data that `write` wrote; `ValueError` if the file is damaged, changed or of another version."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"{path} is no complete JSON file ({error}); calibrate and save again.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a calibration: its `format` is not {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {document.get('version')!r}, this release reads {VERSION}; calibrate and save again."
        )
    data = document.get("calibration")
    if not isinstance(data, dict) or document.get("sha256") != _checksum(data):
        raise ValueError(f"{path} was changed after it was saved (its checksum is off); calibrate and save again.")
    return data


def _checksum(data: dict) -> str:
    """Of the content, whatever the layout of the file: hexadecimal SHA-256."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
