"""How a sandbox is started, by backend name, and whether that works on this machine."""

from __future__ import annotations

import importlib.util
import marshal
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from hermes_jax.tools import supervisor

WORKSPACE = "/workspace"
_USER_ID = 1000
_PASSWD = f"agent:x:{_USER_ID}:{_USER_ID}::{WORKSPACE}:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n".encode()
_GROUP = f"agent:x:{_USER_ID}:\nnogroup:x:65534:\n".encode()
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "bash.bashrc", "mime.types", "magic")
_INSIDE_SUPERVISOR = "/run/supervisor.pyc"


@dataclass(frozen=True)
class SandboxSettings:
    """What a sandbox may use.

    Args:
        backend: "bubblewrap", or "local" for no isolation at all.
        memory_bytes: for each process, and (bubblewrap) for all together.
        processes: at most so many at once (bubblewrap).
        file_bytes: largest file that a command can write.
        workspace_bytes, tmp_bytes: size of `/workspace`, and of `/tmp` and `/dev/shm` (bubblewrap).
        read_only: further host paths that commands can read, at the same place (bubblewrap).
        start_timeout_s: the sandbox answers within this time after its start.
        grace_s: a request is answered within this time (after the command's own timeout), else the sandbox is ended.
    """

    backend: str = "bubblewrap"
    memory_bytes: int = 1 << 30
    processes: int = 128
    file_bytes: int = 64 << 20
    workspace_bytes: int = 64 << 20
    tmp_bytes: int = 64 << 20
    read_only: tuple[str, ...] = ()
    start_timeout_s: float = 60.0
    grace_s: float = 20.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown sandbox backend {self.backend!r}; known: {', '.join(sorted(BACKENDS))}")
        object.__setattr__(self, "read_only", tuple(self.read_only))


class BackendUnavailable(RuntimeError):
    """A backend does not work on this machine: why, and the command that changes it."""


@dataclass
class Launch:
    """A command line for `subprocess.Popen`, whose standard input becomes the supervisor's channel."""

    argv: list[str]
    env: dict[str, str]
    cwd: str | None = None
    pass_fds: list[int] = field(default_factory=list)  # to be closed once the process has started
    workspace: str | None = None  # host directory to be removed at the end

    def start(self, stdin: socket.socket, log: int) -> subprocess.Popen[bytes]:
        """Starts the process; `log` takes what it prints."""
        try:
            return subprocess.Popen(
                self.argv,
                stdin=stdin.fileno(),
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.cwd,
                pass_fds=self.pass_fds,
                process_group=0,
            )
        except OSError:
            self.remove_workspace()
            raise
        finally:
            for fd in self.pass_fds:
                os.close(fd)

    def remove_workspace(self) -> None:
        """Removes the host directory of the sandbox, if it has one."""
        if self.workspace is not None:
            _remove_tree(self.workspace)


def _remove_tree(path: str) -> None:
    """Removes what a command has locked, too, and trees that are deeper than Python's own functions can follow."""
    for command in (["chmod", "-R", "u+rwx", "--", path], ["rm", "-rf", "--", path]):
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _supervisor_argv(settings: SandboxSettings, script: str, *more: str) -> list[str]:
    limits = [str(settings.memory_bytes), str(settings.processes), str(settings.file_bytes)]
    return [_interpreter(), "-I", "-S", "-E", script, *limits, *more]


def _interpreter() -> str:
    """The running interpreter without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _environment(home: str, temporary: str) -> dict[str, str]:
    path = "/usr/local/bin:/usr/bin:/bin:" + os.path.dirname(_interpreter())
    return {"PATH": path, "HOME": home, "TMPDIR": temporary, "LANG": "C.UTF-8", "TERM": "dumb", "USER": "agent"}


def bubblewrap_launch(settings: SandboxSettings) -> Launch:
    """Own process, user, network, IPC and host-name namespaces; read-only system; three small writable tmpfs."""
    fds = [_memory_file(content) for content in (_PASSWD, _GROUP, _supervisor_bytecode())]
    argv = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--die-with-parent"]
    argv += ["--cap-drop", "ALL", "--uid", str(_USER_ID), "--gid", str(_USER_ID)]
    argv += ["--hostname", "sandbox", "--clearenv"]
    for name, value in _environment(WORKSPACE, "/tmp").items():
        argv += ["--setenv", name, value]
    argv += _system_binds()
    for fd, place in zip(fds, ("/etc/passwd", "/etc/group", _INSIDE_SUPERVISOR), strict=True):
        argv += ["--ro-bind-data", str(fd), place]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for place, size in ((WORKSPACE, settings.workspace_bytes), ("/tmp", settings.tmp_bytes)):
        argv += ["--size", str(size), "--tmpfs", place]
    argv += ["--size", str(settings.tmp_bytes), "--tmpfs", "/dev/shm"]
    for place in (os.path.realpath(sys.base_prefix), *settings.read_only):  # may lie below /tmp or the workspace
        if not Path(place).is_relative_to("/usr"):
            argv += ["--ro-bind", place, place]
    for place in ("/dev", "/proc", "/"):  # started as root, commands would own /proc/sys and could change the machine
        argv += ["--remount-ro", place]
    argv += ["--chdir", WORKSPACE, "--", *_supervisor_argv(settings, _INSIDE_SUPERVISOR)]
    return Launch(argv, env={"PATH": os.environ.get("PATH", os.defpath)}, pass_fds=fds)


def _system_binds() -> list[str]:
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            argv += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return argv


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("sandbox")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@lru_cache(maxsize=1)
def _supervisor_bytecode() -> bytes:
    """The supervisor as a .pyc file: to compile it in every sandbox would double the cost of its start."""
    source = Path(supervisor.__file__).read_bytes()
    code = compile(source, "supervisor.py", "exec", dont_inherit=True, optimize=2)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def local_launch(settings: SandboxSettings) -> Launch:
    """No isolation: commands run as this user, in a temporary directory that is removed at the end."""
    workspace = tempfile.mkdtemp(prefix="hermes-jax-")
    script = _memory_file(_supervisor_bytecode())
    argv = _supervisor_argv(settings, f"/proc/self/fd/{script}", workspace)
    env = _environment(workspace, workspace)
    return Launch(argv, env=env, cwd=workspace, pass_fds=[script], workspace=workspace)


BACKENDS: dict[str, Callable[[SandboxSettings], Launch]] = {
    "bubblewrap": bubblewrap_launch,
    "local": local_launch,
}


def check_backend(name: str) -> None:
    """Starts one sandbox and ends it.

    Raises:
        ValueError: unknown backend.
        BackendUnavailable: it does not work here; the message holds one command to run. Nothing else is used instead.
    """
    settings = SandboxSettings(backend=name)
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        raise BackendUnavailable(_remedy("bubblewrap is not installed", "apt-get install -y bubblewrap"))
    launch = BACKENDS[name](settings)
    ours, theirs = socket.socketpair()
    log = os.memfd_create("sandbox-log")
    try:
        ours.settimeout(settings.start_timeout_s)
        with theirs:
            process = launch.start(theirs, log)
        try:
            answered = ours.recv(1) != b""
        except OSError:
            answered = False
        ours.close()
        _wait_or_kill(process, 5.0 if answered else 0.1)
        if not answered:
            raise BackendUnavailable(_explain(name, os.pread(log, 2000, 0).decode(errors="replace").strip()))
    finally:
        ours.close()
        os.close(log)
        launch.remove_workspace()


def _wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _explain(name: str, printed: str) -> str:
    what = f"the sandbox backend {name!r} does not start: {printed or 'no message'}"
    if name != "bubblewrap":
        return what
    if "Unknown option" in printed:
        return _remedy(f"{what}; bubblewrap 0.8 or newer is needed", "apt-get install -y bubblewrap")
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return _remedy(
            f"{what}; this container may not make namespaces",
            "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined ...",
        )
    for knob, value in (
        ("kernel/apparmor_restrict_unprivileged_userns", "0"),
        ("kernel/unprivileged_userns_clone", "1"),
        ("user/max_user_namespaces", "10000"),
    ):
        file = Path("/proc/sys", knob)
        if file.exists() and (file.read_text().strip() == "0") == (value != "0"):
            return _remedy(what, f"sysctl -w {knob.replace('/', '.')}={value}")
    return _remedy(what, "bwrap --unshare-all --ro-bind / / true")


def _remedy(what: str, command: str) -> str:
    sudo = "sudo " if os.geteuid() and not command.startswith(("docker", "bwrap")) else ""
    return (
        f"{what}. Run: {sudo}{command}\n"
        "(or write `terminal_backend: local` to run the model's commands without any isolation, as this user)"
    )
