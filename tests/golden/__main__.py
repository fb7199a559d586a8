"""Rewrites the recorded files and names those that differed: `python -m tests.golden`."""

from tests.golden.files import write

if __name__ == "__main__":
    for path in write():
        print(path if path.exists() else f"{path} (deleted)")
