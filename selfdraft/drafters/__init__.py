"""One file per drafter. A module that sets `drafter_class` is a drafter, and its file name is its name."""
