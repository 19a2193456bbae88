"""The plugin that a runtime starts: it has the daemon do the call.

Whoever starts Python for every pod pays for what is imported: `json` alone costs as
much as the interpreter. So nothing is imported here but what is built into that, not
even `__future__`. The daemon has the whole plugin loaded; it gets the variables and the
configuration in one gRPC call (`metis.v1.Plugin`), and what it answers is written down.

Where there is no daemon, none that knows the service, no answer in time or anything
unusual, the whole plugin (`metis.cni.plugin`) goes on in this process with what was
read. Asking twice does no harm: an owner's ADD is answered with what it holds, its DEL
with success when it holds nothing.

May touch: the standard streams, the daemon's socket, /proc/self, and the log that the
answer names.
"""

import _socket
import posix
import sys
import time

RUN_SECONDS, STATUS_SECONDS, UNDO_SECONDS = (1.0, 11.0), (0.2, 0.6), (1.0, 2.0)
"""Seconds until the daemon's first word, which a hanging one never says, and until the
answer: somewhat more than it takes at most. See `metis.cni.client`. A daemon that only
waits for a processor has the whole time for its first word."""

MAX_STDIN_BYTES = 16 * 1024 * 1024
"""Most that is read of a standard input that may have no end."""

MAX_REQUEST_BYTES = 60 * 1024
"""Largest request. It goes off before the daemon has said how much it takes, which is
65,535 bytes until then, whatever it says (RFC 9113 section 6.9.2)."""

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Most bytes of an answer, frames and all: what gRPC messages may have."""

MAX_LOG_BYTES = 10 * 1024 * 1024
"""Size at which a log is rotated, by `metis.cni.log`: some 60,000 calls. With the older
generation that is 20 MiB, which a small /var or a tmpfs can spare."""

FRAME_BYTES = 16_384
"""Largest frame that every peer takes (RFC 9113 section 6.5.2)."""

DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 7, 8
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
"""Types and flags of frames (RFC 9113 section 6)."""

OWN_NETNS = "/proc/self/ns/net"

BROKEN = (
    "the plugin's Python environment was moved or is broken: "
    "`metis install` puts it right"
)

EXPLANATION = f"""{{
    "code": 999,
    "msg": "MESSAGE",
    "details": "{BROKEN}"
}}"""


class Unanswered(Exception):
    """No answer came; the message says why if the daemon is there all the same."""


class Relay:
    """One call of the plugin.

    Attributes:
      name: under which the program was started.
      socket_path: where the daemon serves.
      parent: the process that waits for the answer.
      stdin: standard input; None as long as it was not read.
      problem: what has come between; the call ends with it.
      passed_over: why the daemon, which is there, is not asked again; or "".
      unread: the allocation whose result could not be written, and why.
    """

    def __init__(self, name: str, socket_path: str, parent: int) -> None:
        self.name = name.rpartition("/")[2]
        self.socket_path = socket_path
        self.parent = parent
        self.stdin: bytes | None = None
        self.problem: BaseException | None = None
        self.passed_over = ""
        self.unread: tuple[str, str] | None = None

    def carry_out(self) -> int:
        """Get the answer from the daemon, or from the whole plugin; the exit status."""
        environ = posix.environ
        command = environ.get(b"CNI_COMMAND")
        try:
            if command != b"VERSION":  # to which nobody may write
                if not is_complete(environ):
                    return self.take_over()
                self.stdin = read_stdin()
            request = self.request(environ)
            seconds = STATUS_SECONDS if command == b"STATUS" else RUN_SECONDS
            answer = ask(self.socket_path, b"Run", request, seconds)
        except Unanswered as error:
            self.passed_over = str(error)
            return self.take_over()
        except (OSError, KeyboardInterrupt) as error:
            self.problem = error  # of standard input, or an interrupt at any time
            return self.take_over()
        return self.tell(request, answer)

    def request(self, environ: dict[bytes, bytes]) -> bytes:
        """The RunRequest."""
        parts = [
            field(1, name + b"=" + value)
            for name, value in environ.items()
            if name.startswith(b"CNI_")
        ]
        parts += [
            field(2, self.stdin or b""),
            field(3, self.name.encode(errors="surrogateescape")),
            field(4, self.socket_path.encode(errors="surrogateescape")),
            field(5, read_stat()),
        ]
        if is_own_netns(environ.get(b"CNI_NETNS", b"")):
            parts.append(b"\x30\x01")  # field 6, true
        return b"".join(parts)

    def tell(self, request: bytes, answer: dict[int, bytes]) -> int:
        """Write what the daemon answered; what nobody reads is undone."""
        status = int(1 in answer)
        try:
            if 2 in answer:
                write_to_parent(self.parent, answer[2])
        except (OSError, KeyboardInterrupt) as error:
            status = 1
            if 6 in answer:
                why = str(error) or type(error).__name__
                self.unread = text(answer[6]), why
                undo = field(1, request) + field(2, answer[6]) + field(3, why.encode())
                try:
                    answer = ask(self.socket_path, b"Undo", undo, UNDO_SECONDS)
                except (Unanswered, KeyboardInterrupt) as late:
                    self.passed_over = str(late)
                    return self.take_over()
        try:
            complain(answer.get(3, b""))
            if 5 in answer and not append(answer[5], answer[4]):
                from metis.cni import plugin  # which knows what else may be done

                plugin.append_line(text(answer[5]), answer[4], plugin.complain_line)
        except BaseException as error:  # the runtime has its answer
            complain(f"metis: the log cannot be written: {error!a}\n".encode())
        return status

    def take_over(self) -> int:
        """Go on as the whole plugin; the exit status."""
        try:
            from metis.cni import plugin
        except BaseException as error:
            return explain(error)
        return plugin.take_over(self)


def main(name: str, socket_path: str, search_path: list[str]) -> int:
    """Be the installed program; a call of a runtime ends the process.

    Args:
      name: under which the program was started, with or without directories.
      socket_path: where the daemon serves.
      search_path: what `sys.path` must be to import everything else.

    Returns:
      The exit status, where nobody asked for a plugin.
    """
    parent = posix.getppid()  # first: from here on it is noticed when it goes
    sys.path[:] = search_path
    if not posix.environ.get(b"CNI_COMMAND"):
        from metis.__main__ import main as program

        return program()
    occupy_closed_descriptors()
    # Nothing is buffered, and taking the interpreter apart costs a millisecond.
    posix._exit(Relay(name, socket_path, parent).carry_out())  # noqa: SLF001 - os has it


def text(data: bytes) -> str:
    """Bytes of the environment as Python spells them, in any locale (PEP 383)."""
    return data.decode(errors="surrogateescape")


def is_complete(environ: dict[bytes, bytes]) -> bool:
    """Whether all variables are there, so that standard input is worth reading.

    If not, the whole plugin says which are missing, and does not wait for the end of
    what a person types. See `metis.cni.environment`.
    """
    needed = [b"CNI_PATH"]
    command = environ[b"CNI_COMMAND"]
    if command not in (b"GC", b"STATUS"):
        needed += [b"CNI_CONTAINERID", b"CNI_IFNAME"]
        if command != b"DEL":
            needed.append(b"CNI_NETNS")
    return all(map(environ.get, needed))


def read_stdin() -> bytes:
    """All of standard input.

    Raises:
      OSError: it cannot be read, or has no end.
    """
    pieces, size = [], 0
    while piece := posix.read(0, 65_536):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_STDIN_BYTES:
            raise OSError(f"it has more than {MAX_STDIN_BYTES} bytes")
    return b"".join(pieces)


def read_stat(process: str | int = "self") -> bytes:
    """The kernel's record of a process; nothing where it does not tell."""
    try:
        path = f"/proc/{process}/stat"
        descriptor = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    stat = posix.read(descriptor, 4096)
    posix.close(descriptor)
    return stat


def is_own_netns(path: str | bytes) -> bool:
    """Whether a path is the network namespace of this process; no if it is nothing."""
    try:
        theirs, ours = posix.stat(path), posix.stat(OWN_NETNS)
    except (OSError, ValueError):
        return False
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def ask(
    path: str, method: bytes, message: bytes, seconds: tuple[float, float]
) -> dict[int, bytes]:
    """Make one unary call of `metis.v1.Plugin`.

    Nothing that the daemon says about the connection has to be known: one request
    in frames and windows that every peer takes, without compression, and one message
    on its stream. A status alone, which would have to be decompressed, is no answer.

    Args:
      path: the socket.
      method: of the service.
      message: the request.
      seconds: until the first word of a daemon that hangs, and until the whole answer.

    Returns:
      The fields of the response.

    Raises:
      Unanswered: there is no such answer.
    """
    if len(message) > MAX_REQUEST_BYTES:
        raise Unanswered
    patience, until_answer = seconds
    ends = time.monotonic() + until_answer
    size, received, body = 0, bytearray(), bytearray()
    try:
        peer = _socket.socket(_socket.AF_UNIX)
        try:
            peer.settimeout(patience)
            peer.connect(path)
            peer.sendall(opening(method, message))
            while (answer := whole_message(received, body)) is None:
                left = ends - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                peer.settimeout(left if size else min(patience, left))
                try:
                    piece = peer.recv(65_536)
                except TimeoutError:
                    if size or not waits_its_turn(peer):
                        raise
                    continue
                received += piece
                size += len(piece)
                if not piece or size > MAX_ANSWER_BYTES:
                    raise Unanswered
            found = fields(answer)
            if 7 in found:
                raise Unanswered(text(found[7]))
            return found
        finally:
            peer.close()
    except TimeoutError:
        is_late = size or time.monotonic() >= ends
        raise Unanswered(
            "it did not answer in time"
            if is_late
            else f"{path}: no answer within {patience:g} s"
        ) from None
    except (OSError, ValueError, IndexError):
        raise Unanswered from None


def waits_its_turn(peer: _socket.socket) -> bool:
    """Whether who listens there is silent for want of a processor or a disk.

    Two hundred pods that start at once on two processors keep a sound daemon from its
    first word for longer than a hanging one is given, and each whole plugin would take
    twenty times what the daemon still has to do. One that was stopped, or waits for
    something that never comes, is not seen in such a state.
    """
    # struct ucred (unix(7)), of which the pid is the first of three numbers.
    process = peer.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[:4]
    stat = read_stat(int.from_bytes(process, sys.byteorder))
    return stat.rpartition(b") ")[2][:1] in (b"R", b"D")  # proc_pid_stat(5)


def opening(method: bytes, message: bytes) -> bytes:
    """All that a client has to say for one call (RFC 9113; gRPC over HTTP/2).

    Windows are as wide as the largest answer. The peer's SETTINGS are not acknowledged:
    the connection is over before anybody minds.
    """
    name = b"/metis.v1.Plugin/" + method
    # Section 6 of RFC 7541: whole entries of the static table, then literals with a
    # name of that table (:path, :authority, content-type) and one without.
    headers = b"\x83\x86\x04%c%b\x01\x09localhost" % (len(name), name)
    headers += b"\x0f\x10\x10application/grpc\x00\x02te\x08trailers"
    window = MAX_ANSWER_BYTES.to_bytes(4)
    body = b"\0" + len(message).to_bytes(4) + message
    pieces = [body[at : at + FRAME_BYTES] for at in range(0, len(body), FRAME_BYTES)]
    return b"".join(
        [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            frame(SETTINGS, 0, 0, b"\0\2\0\0\0\0\0\4" + window),  # no push; window
            frame(WINDOW_UPDATE, 0, 0, window),
            frame(HEADERS, END_HEADERS, 1, headers),
            *(frame(DATA, 0, 1, piece) for piece in pieces[:-1]),
            frame(DATA, END_STREAM, 1, pieces[-1]),
        ]
    )


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One HTTP/2 frame (RFC 9113 section 4.1)."""
    head = len(payload).to_bytes(3) + bytes((kind, flags))
    return head + stream.to_bytes(4) + payload


def whole_message(received: bytearray, body: bytearray) -> bytes | None:
    """The one message on the call's stream, once that has ended; None until then.

    Args:
      received: what came; whole frames are taken out of it.
      body: what they have had of the stream's data; more is added to it.

    Raises:
      ValueError: there will be none.
    """
    at = 0
    while len(received) >= at + 9:
        size = int.from_bytes(received[at : at + 3])
        kind, flags = received[at + 3 : at + 5]
        stream, payload = received[at + 5 : at + 9], received[at + 9 : at + 9 + size]
        if size > FRAME_BYTES:
            raise ValueError("a frame is larger than was allowed")
        if len(payload) < size:
            break
        at += 9 + size
        # A daemon that stops says so, too, and which calls it still finishes.
        if kind == GOAWAY and payload[:4] == b"\0\0\0\0":
            raise ValueError("the call is not taken")
        if stream != b"\0\0\0\1" or kind not in (DATA, HEADERS, RST_STREAM):
            continue
        if kind == RST_STREAM or flags & PADDED:
            raise ValueError("the call is cut off, or not from a daemon of ours")
        if kind == DATA:
            body += payload
        if flags & END_STREAM:
            if len(body) < 5 or body[:5] != b"\0" + (len(body) - 5).to_bytes(4):
                raise ValueError("a status and no message, or not one")
            return bytes(body[5:])
    del received[:at]
    return None


def field(number: int, value: bytes) -> bytes:
    """One field of a protobuf message."""
    size, rest = b"", len(value)
    while rest > 127:
        size += bytes((rest & 127 | 128,))
        rest >>= 7
    return bytes((number << 3 | 2,)) + size + bytes((rest,)) + value


def fields(message: bytes) -> dict[int, bytes]:
    """The fields of a protobuf message; a number counts as nothing.

    Raises:
      ValueError: it has other fields than texts and numbers, or is cut off.
      IndexError: it is cut off.
    """
    found, at = {}, 0
    while at < len(message):
        key, at = number_at(message, at)
        value, at = number_at(message, at)
        size = value if key & 7 == 2 else 0
        found[key >> 3] = message[at : at + size]
        at += size
        if key & 7 not in (0, 2) or at > len(message):
            raise ValueError("no such message")
    return found


def number_at(message: bytes, at: int) -> tuple[int, int]:
    """A varint of 64 bits, and the place behind it."""
    number = shift = 0
    while message[at] > 127:
        if shift > 56:
            raise ValueError("no such number")
        number |= (message[at] & 127) << shift
        shift, at = shift + 7, at + 1
    return number | message[at] << shift, at + 1


def append(path: bytes, line: bytes) -> bool:
    """Append a line to a log that needs no more than that; False if it may.

    That is one which is small, private and reached by no link.
    """
    try:
        steps = [at for at, byte in enumerate(path) if byte == 47 and at]
        if any(posix.lstat(path[:at]).st_mode & 0o170000 == 0o120000 for at in steps):
            return False
        flags = posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT | posix.O_CLOEXEC
        flags |= posix.O_NONBLOCK | posix.O_NOFOLLOW
        descriptor = posix.open(path, flags, 0o600)
        try:
            status = posix.fstat(descriptor)
            if status.st_mode & ~0o600 != 0o100000 or status.st_size >= MAX_LOG_BYTES:
                return False
            return posix.write(descriptor, line) == len(line)
        finally:
            posix.close(descriptor)
    except (OSError, ValueError):
        return False


def write(descriptor: int, data: bytes) -> None:
    """Write all of it, without a buffer that could fail again at exit."""
    while data:
        data = data[posix.write(descriptor, data) :]


def write_to_parent(parent: int, data: bytes) -> None:
    """Write to standard output, if whoever started this process still lives.

    A runtime that gives up kills the main plugin and not its delegates. Such a one has
    a new parent, which knows nothing of the call, and would tell nobody.

    Raises:
      OSError: nobody will read it.
    """
    if posix.getppid() != parent:
        raise BrokenPipeError(32, "the process that started the plugin is gone")
    write(1, data)


def complain(data: bytes) -> None:
    """Write to standard error; if nobody listens, there is nobody else to tell."""
    try:
        write(2, data)
    except OSError:
        return


def explain(error: BaseException) -> int:
    """Tell as an error object that the rest of the program is missing or broken.

    By hand, because what is broken may be the standard library.
    """
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    message = ascii(message)[1:-1].replace("\\", "/").replace('"', "'")
    try:
        write(1, EXPLANATION.replace("MESSAGE", message).encode())
    except OSError:
        return 1  # nobody reads it
    return 1


def occupy_closed_descriptors() -> None:
    """Keep files and sockets off the numbers 0, 1 and 2.

    A runtime that closed one of them would otherwise have the result written into
    whatever is opened next. What is put there reads as empty and cannot be written to.
    """
    for descriptor in (0, 1, 2):
        try:
            posix.fstat(descriptor)
        except OSError:
            posix.open("/dev/null", posix.O_RDONLY)  # the lowest free number
