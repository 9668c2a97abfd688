"""The parser of all commands: reports errors in one line, with the likely intended word."""

import argparse
import re
from typing import Any, NoReturn

from daso.checks import did_you_mean

CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Parser that exits with a one-line error on wrong words."""

    # argparse would report it from the top-level parser, which names the wrong --help.
    def parse_known_args(self, *words: Any, **keywords: Any) -> Any:
        """Parse words; exit on words that this command does not know."""
        options, rest = super().parse_known_args(*words, **keywords)
        if rest:
            hint = did_you_mean(rest[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        if (match := CHOICE.search(message)) is not None:
            message += did_you_mean(match[1], re.findall(r"[\w.+-]+", match[2]))
        one_line = " ".join(message.split())
        self.exit(2, f"daso: {one_line}; `{self.prog} --help` shows how\n")
