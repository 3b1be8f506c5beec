"""A study's display on standard error, as candidates begin and end; the number of candidates is the argument."""

import sys

from tinyllm_ray.train.show import PipeConsole
from tinyllm_ray.tune.live import open_display, say
from tinyllm_ray.tune.table import Row, View


def row(number: int, running: bool) -> Row:
    label = f"mb{number} compiled max-autotune-no-cudagraphs flash t8 c{number:02d}"
    if running:
        return Row(f"c{number}", label, "running", "window 2", None, None, None)
    if number % 4 == 3:
        return Row(f"c{number}", label, "out_of_memory", "OutOfMemoryError: \x1b[31m90 GiB\nof 80", None, None, 31.0)
    return Row(f"c{number}", label, "complete", "", 1_900_000.0 + number, 1.0 + number / 100, 31.0)


def main() -> None:
    console = PipeConsole(stderr=True)
    say(console, "budget 45m; starting Ray")
    rows: list[Row] = []
    title = "20.4M parameters, 32,768 targets an update"
    with open_display(console, lambda: View(title, rows, 125.4)) as display:
        for number in range(int(sys.argv[1])):
            for running in (True, False):
                rows[number:] = [row(number, running)]
                display.show(rows[-1])
            if number == 1:
                display.say("a line that is said \x1b[2J meanwhile, longer than a narrow terminal has columns")
    say(console, "ended: space exhausted")


main()
