"""A small terminal in memory."""


class Screen:
    """Just enough of a terminal: text, CR, LF, cursor up, erase a line. It scrolls and it folds."""

    def __init__(self, columns, lines):
        self.columns, self.lines = columns, lines
        self.rows, self.row, self.column = [""], 0, 0
        self.encoding, self._rest = "utf-8", ""

    def isatty(self):
        return True

    def flush(self):
        pass

    def write(self, text):
        """Take output in pieces of any length: a sequence may be cut in two."""
        text, self._rest = self._rest + text, ""
        while text:
            if text == "\x1b":
                self._rest = text
                return
            if text.startswith("\x1b["):
                end = next((index for index, letter in enumerate(text[2:], 2) if letter.isalpha()), None)
                if end is None:
                    self._rest = text
                    return
                self._control(text[2:end], text[end])
                text = text[end + 1 :]
                continue
            self._letter(text[0])
            text = text[1:]

    def top(self):
        return max(0, len(self.rows) - self.lines)

    def shown(self):
        return [row.rstrip() for row in self.rows[self.top() :]]

    def _control(self, argument, letter):
        if letter == "A":
            self.row = max(self.top(), self.row - int(argument))
        elif letter == "K":
            assert argument == "2", "the whole line"
            self.rows[self.row] = ""
        else:
            assert letter == "m", f"this terminal does not know {argument}{letter}"

    def narrow(self, columns):
        """Lines that are too long now are folded, and the cursor stays with its letter."""
        folded, before = [], 0
        for index, row in enumerate(self.rows):
            pieces = [row[at : at + columns] for at in range(0, len(row), columns)] or [""]
            if index == self.row:
                before, self.column = len(folded) + len(pieces) - 1, len(pieces[-1])
            folded += pieces
        self.columns, self.rows, self.row = columns, folded, before

    def _letter(self, letter):
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self.row += 1
            self.rows += [""] * (self.row + 1 - len(self.rows))
        else:
            if self.column == self.columns:
                self._letter("\n")
                self.column = 0
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + letter + row[self.column + 1 :]
            self.column += 1
