"""First process of a sandbox: starts commands, captures their output, reads and writes files.

The worker server starts this one file with `python -I -S -E supervisor.py MEMORY PROCESSES FILE_BYTES WORKSPACE` and a
socket as standard input; the rest of the package does not exist in the sandbox, so only the standard library is used,
and little of it, because its import time is paid once per episode.

A frame is two lengths, a header of words and a payload of bytes. Requests are answered in order:

    run TIMEOUT_S OUTPUT_LIMIT; command  -> done EXIT_CODE|- REASON OMITTED_BYTES HEAD_LENGTH; head + tail of the output
    read LIMIT_BYTES; path               -> data; content
    write; path NUL content              -> ok
    kill                                 -> ok      (every process of the sandbox but this one has ended)

A failure is `oserror ERRNO; message` or `failed; message`. REASON is exited, timeout, interrupted, processes or memory.
A request that arrives while a command runs interrupts that command. End of the channel ends the sandbox.

In a process namespace of its own this is process 1, which no signal from inside can kill or stop, and which nothing
inside can trace. Without one (`local`) it adopts orphans, so that no descendant escapes `kill`.
"""

import errno
import os
import resource
import select
import stat
import sys
import time
from struct import Struct

LENGTHS = Struct("<II")
READ_BYTES = 1 << 16
PATH_BYTES = 4096  # longest path that the kernel takes
CHECK_EVERY_S = 0.1
MAX_BACKGROUND_PIPES = 64
SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25  # importing `signal` would cost 4 ms
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def encode(header: bytes, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return LENGTHS.pack(len(header), len(payload)) + header + payload


def descendants(root: int) -> list[int]:
    """Ids of all processes below `root`, from /proc (Linux)."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # ended meanwhile
            children.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Output:
    """Head and tail of a stream, and how much of it was left out between them."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit // 2
        self.tail_limit = limit - self.head_limit
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            chunk = chunk[room:]
        self.tail += chunk
        if len(self.tail) > 2 * self.tail_limit + READ_BYTES:
            self._trim()

    def _trim(self) -> None:
        if len(self.tail) > self.tail_limit:
            del self.tail[: len(self.tail) - self.tail_limit]

    def frame(self, exit_code: int | None, reason: str) -> bytes:
        self._trim()
        omitted = self.total - len(self.head) - len(self.tail)
        code = "-" if exit_code is None else str(exit_code)
        header = f"done {code} {reason} {omitted} {len(self.head)}"
        return encode(header.encode(), bytes(self.head + self.tail))


class Supervisor:
    """Serves one channel until it closes. `isolated`: this is process 1 of a namespace of its own."""

    def __init__(self, control: int, memory_bytes: int, processes: int, isolated: bool) -> None:
        self.control = control
        self.memory_bytes = memory_bytes
        self.processes = processes
        self.isolated = isolated
        self.background: list[int] = []  # output pipes of processes that outlived their command
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)

    def serve(self) -> None:
        try:
            self.send(encode(b"ready"))
            self.serve_requests()
        except ConnectionError:
            return  # the server is gone

    def serve_requests(self) -> None:
        while True:
            children_left = self.reap(None) or bool(self.background)
            ready = self.poll.poll(CHECK_EVERY_S * 1000 if children_left else None)
            for fd, _ in ready:
                if fd != self.control:
                    self.drain_background(fd)
            if any(fd == self.control for fd, _ in ready):
                header = self.receive()
                if header is None:
                    return
                self.send(self.answer(*header))
            elif children_left and self.over_limit():
                self.end_all()

    def answer(self, words: list[str], payload: bytes) -> bytes:
        try:
            if words[0] == "run":
                return self.run(payload, float(words[1]), int(words[2]))
            if words[0] == "read":
                return encode(b"data", read_file(payload, int(words[1]), words[2] == "links"))
            if words[0] == "write":
                write_file(*payload.split(b"\0", 1))
                return encode(b"ok")
            if words[0] == "kill":
                self.end_all()
                return encode(b"ok")
            raise ValueError(f"unknown request {words[0]!r}")
        except OSError as error:
            return encode(f"oserror {error.errno or 0}".encode(), str(error.strerror or error).encode())
        except Exception as error:
            return encode(b"failed", f"{type(error).__name__}: {error}".encode(errors="replace"))

    def run(self, command: bytes, timeout_s: float, output_limit: int) -> bytes:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writer, True)
        try:
            pid = spawn(command, writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        output = Output(output_limit)
        status, reason = self.wait(pid, reader, output, time.monotonic() + timeout_s)
        if reason != "exited":
            self.end_all()
        at_end = drain(reader, output)
        if at_end or reason != "exited":
            self.poll.unregister(reader)
            os.close(reader)
        else:
            self.keep_in_background(reader)
        return output.frame(None if reason != "exited" else exit_code_of(status), reason)

    def wait(self, pid: int, reader: int, output: Output, deadline: float) -> tuple[int, str]:
        """Waits for the command's own process. Returns (wait status, reason)."""
        watch = os.pidfd_open(pid)
        self.poll.register(watch, select.POLLIN)
        self.poll.register(reader, select.POLLIN)
        next_check = time.monotonic() + CHECK_EVERY_S
        try:
            while True:
                now = time.monotonic()
                events = self.poll.poll(max(0.0, min(deadline, next_check) - now) * 1000)
                for fd, _ in events:
                    if fd == reader:
                        self.capture(reader, output)
                    elif fd not in (watch, self.control):
                        self.drain_background(fd)
                fds = [fd for fd, _ in events]
                if watch in fds:
                    return os.waitpid(pid, 0)[1], "exited"
                if self.control in fds:
                    return 0, "interrupted"
                now = time.monotonic()
                if now >= deadline:
                    return 0, "timeout"
                if now >= next_check:
                    next_check = now + CHECK_EVERY_S
                    self.reap(pid)
                    over = self.over_limit()
                    if over:
                        return 0, over
        finally:
            self.poll.unregister(watch)
            os.close(watch)

    def capture(self, reader: int, output: Output) -> None:
        try:
            chunk = os.read(reader, READ_BYTES)
        except BlockingIOError:
            return
        output.add(chunk)
        if not chunk:  # closed by all writers, while the command goes on: nothing left to watch here
            self.poll.modify(reader, 0)
            null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(null, reader, inheritable=False)  # a hung-up pipe would wake `poll` all the time
            os.close(null)

    def keep_in_background(self, reader: int) -> None:
        """Goes on reading what background processes write, so that they neither block nor die of a closed pipe."""
        self.background.append(reader)
        if len(self.background) > MAX_BACKGROUND_PIPES:
            self.forget_background(self.background[0])

    def drain_background(self, fd: int) -> None:
        try:
            if not os.read(fd, READ_BYTES):
                self.forget_background(fd)
        except BlockingIOError:
            pass

    def forget_background(self, fd: int) -> None:
        self.background.remove(fd)
        self.poll.unregister(fd)
        os.close(fd)

    def reap(self, but: int | None) -> bool:
        """Collects ended orphans (not the command `but`, whose status is wanted). True if children are left."""
        flags = os.WEXITED | os.WNOHANG
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, flags | os.WNOWAIT)
            except ChildProcessError:
                return False
            if ended is None or ended.si_pid == but:
                return True
            os.waitpid(ended.si_pid, 0)

    def over_limit(self) -> str:
        """ "processes" or "memory" if the sandbox as a whole uses too much, else ""."""
        if not self.isolated:
            return ""
        names = [name for name in os.listdir("/proc") if name.isdigit()]
        if len(names) - 1 > self.processes:
            return "processes"
        pages = 0
        for name in names:
            try:
                with open(f"/proc/{name}/statm", "rb") as file:
                    pages += int(file.read().split()[1])
            except OSError:
                continue  # ended meanwhile
        return "memory" if pages * resource.getpagesize() > self.memory_bytes else ""

    def end_all(self) -> None:
        """Kills and collects every process of the sandbox but this one."""
        if self.isolated and os.getpid() == 1:
            kill(-1)
            while True:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    break
        else:
            self.end_descendants()
        for fd in list(self.background):
            self.forget_background(fd)

    def end_descendants(self) -> None:
        while pids := descendants(os.getpid()):
            for pid in pids:
                kill(pid)
            self.reap(None)
            time.sleep(0.002)

    def send(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            view = view[os.write(self.control, view) :]

    def receive(self) -> tuple[list[str], bytes] | None:
        """Next request, or None at the end of the channel."""
        lengths = self.read_exactly(LENGTHS.size)
        if lengths is None:
            return None
        header_length, payload_length = LENGTHS.unpack(lengths)
        header = self.read_exactly(header_length)
        payload = self.read_exactly(payload_length)
        return None if header is None or payload is None else (header.decode().split(), payload)

    def read_exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = os.read(self.control, min(count - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)


def kill(pid: int) -> None:
    """SIGKILL; to a process that has ended already it is no error."""
    try:
        os.kill(pid, SIGKILL)
    except ProcessLookupError:
        return


def spawn(command: bytes, output: int) -> int:
    """Starts `bash -c command` in a process group of its own, without standard input. Returns its process id."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    argv = [b"bash", b"-c", command]
    # Python ignores these two signals; commands get their defaults back.
    return os.posix_spawn(
        "/bin/bash", argv, os.environ, file_actions=actions, setpgroup=0, setsigdef=[SIGPIPE, SIGXFSZ]
    )


def drain(reader: int, output: Output) -> bool:
    """Reads what is there now (bounded, a background process may go on writing). True at the end of the stream."""
    for _ in range(32):
        try:
            chunk = os.read(reader, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            return True
        output.add(chunk)
    return False


def exit_code_of(status: int) -> int:
    """Exit code as a shell reports it: 128 + signal for a process that a signal ended."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def read_file(path: bytes, limit: int, links: bool) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    with open(fd, "rb", buffering=0) as file:
        require_regular(fd)
        if not links and os.fstat(fd).st_nlink > 1:
            raise OSError(errno.EMLINK, "a hard link: the file has other names")
        content = bytearray()
        while len(content) <= limit:
            part = file.read(min(1 << 20, limit + 1 - len(content)))
            if not part:
                return bytes(content)
            content += part
    raise OSError(errno.EFBIG, f"the file has more than {limit} bytes")


def write_file(path: bytes, content: bytes) -> None:
    make_directories(os.path.dirname(path))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    with open(fd, "wb", buffering=0) as file:
        require_regular(fd)
        file.truncate(0)
        view = memoryview(content)
        while view:
            view = view[file.write(view) or 0 :]


def make_directories(path: bytes) -> None:
    """Like `os.makedirs`, which calls itself for every level and so fails where a path has very many."""
    if len(path) >= PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path.rstrip(b"/"))
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            continue


def require_regular(fd: int) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")


def set_limits(memory_bytes: int, processes: int, file_bytes: int, isolated: bool) -> None:
    def lower(which: int, value: int) -> None:
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))

    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_NOFILE, 1024)
    lower(resource.RLIMIT_DATA, memory_bytes)
    lower(resource.RLIMIT_FSIZE, file_bytes)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit())
    if isolated and release >= (5, 14):  # before, this limit counted all processes of the user on the machine
        lower(resource.RLIMIT_NPROC, 2 * processes)  # bounds what can start between two checks; not for root


def prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    memory_bytes, processes, file_bytes = map(int, sys.argv[1:4])
    isolated = os.getpid() == 1
    os.closerange(3, 1 << 16)  # what the start left open
    control = os.dup(0)
    # Non-dumpable: nobody inside can trace this process, write its memory or open its descriptors through /proc.
    prctl(*((PR_SET_DUMPABLE, 0) if isolated else (PR_SET_CHILD_SUBREAPER, 1)))
    set_limits(memory_bytes, processes, file_bytes, isolated)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    supervisor = Supervisor(control, memory_bytes, processes, isolated)
    supervisor.serve()
    if not isolated:
        supervisor.end_all()
        if len(sys.argv) > 4:  # made for this sandbox alone; removed here too, in case the server was killed
            pid = os.posix_spawnp("rm", ["rm", "-rf", "--", sys.argv[4]], os.environ)
            os.waitpid(pid, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
