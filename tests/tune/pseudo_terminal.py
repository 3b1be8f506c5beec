"""A terminal without a screen: runs a command on it, and says what a person would have seen."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Callable, Mapping, Sequence

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[^\[]")


class Terminal:
    """A command on a terminal of its own, which is the command's controlling one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], columns: int, lines: int = 24) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            size = struct.pack("HHHH", lines, columns, 0, 0)
            fcntl.ioctl(0, termios.TIOCSWINSZ, size)
            _keep_what_is_unread()
            os.execvpe(command[0], list(command), dict(environment))
        self.said = b""

    def write(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def read_until(self, true: Callable[[], bool]) -> None:
        """Read what is said until something holds; raises EOFError where the command ends before."""
        while not true():
            if select.select([self._descriptor], [], [], 0.02)[0]:
                self._read()

    def end(self) -> int:
        """Read to the end; the exit status."""
        with contextlib.suppress(EOFError):
            while True:
                self._read()
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def go_away(self) -> int:
        """As where a line drops; the command's exit status."""
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def text(self) -> str:
        return self.said.decode()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            raise EOFError
        self.said += data


def _keep_what_is_unread() -> None:
    """Ctrl-C discards what the terminal has not read yet; one on a desk reads at once, a test between two looks."""
    attributes = termios.tcgetattr(0)
    attributes[3] |= termios.NOFLSH
    termios.tcsetattr(0, termios.TCSANOW, attributes)


class Screen:
    """What a text with control sequences comes to, on a paper as long as it needs to be."""

    def __init__(self, text: str) -> None:
        self.lines = [""]
        self.cursor_shown = True
        self._line = self._column = 0
        position = 0
        while position < len(text):
            if found := _SEQUENCE.match(text, position):
                self._obey(found[1] or "", found[2] or "")
                position = found.end()
                continue
            self._put(text[position])
            position += 1

    @property
    def width(self) -> int:
        """Of the widest line that there ever was."""
        return self._widest

    _widest = 0

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._line, self._column = self._line + 1, 0
            self.lines += [""] * (self._line + 1 - len(self.lines))
        else:
            assert letter.isprintable(), repr(letter)
            line = self.lines[self._line].ljust(self._column)
            self.lines[self._line] = line[: self._column] + letter + line[self._column + 1 :]
            self._column += 1
            self._widest = max(self._widest, self._column)

    def _obey(self, values: str, order: str) -> None:
        match order:
            case "m":
                pass
            case "A":
                self._line -= int(values or 1)
                assert self._line >= 0
            case "K":
                assert values == "2"
                self.lines[self._line] = ""
            case "h" | "l":
                assert values == "?25"
                self.cursor_shown = order == "h"
            case _:
                raise AssertionError(f"the sequence {values}{order} has no place here")
