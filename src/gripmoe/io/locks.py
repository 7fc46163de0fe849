"""Locks of the operating system: one process works in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gripmoe.io.errors import ConfigError
from gripmoe.io.files import NO_ROOM, remove_halves


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Within the block, this process has the lock of `folder`, so that no two processes write there. The lock of a
    killed process ends with the process, and its half-written files are removed. Raises ConfigError if another process
    has the lock, naming that process, if the file system has no locks, or if the folder is somebody else's."""
    with _opened(folder) as file:
        if not take_lock(file, folder):
            file.seek(0)
            raise ConfigError(
                f"{folder}: {file.read() or 'another process'} works on it; wait for it, or stop it and start again: "
                "the run resumes from what it has left"
            )
        file.seek(0)
        file.truncate()
        job = f", SLURM job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        with _telling(folder):  # unbuffered: closing the file would raise the error again
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}{job}".encode())
        remove_halves(folder)
        yield


def _opened(folder: Path) -> IO:
    with _telling(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / ".lock", "a+", encoding="utf-8")


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    """Raises ConfigError, with the remedy, for an error of the system."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EROFS:
            raise ConfigError(f"{folder}: the disk is read-only; name another folder") from None
        if error.errno in NO_ROOM:
            raise ConfigError(f"{folder}: no room to write it; make room and start again") from None
        if isinstance(error, NotADirectoryError | FileExistsError):
            raise ConfigError(f"{folder}: a part of this path is a file; name another folder") from None
        if not isinstance(error, PermissionError):
            raise
        raise ConfigError(
            f"{error.filename}: this user may not write it; name another folder, or have its owner allow it. In a "
            "checkout that several users share, each sets `umask 002`, and its owner runs `chmod -R g+w` on it and "
            "`chmod g+s` on its folders"
        ) from None


def take_lock(file: IO, folder: Path, *, shared: bool = False) -> bool:
    """Takes the kernel's lock of an open file, exclusive or `shared`, until the file is closed; False if another
    process has it. Raises ConfigError if the file system has no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{folder}: its file system gives no lock ({error.strerror}), and without one two processes could "
            "write the same results. Have it mounted with locks (Lustre: `-o flock`; NFS: with its lock service), "
            "or start in a folder on another file system"
        ) from None
    return True
