"""What POSIX says of files, case by case, as root and as others: run by root in two directories, one after the other.

    python3 posix REFERENCE DIRECTORY TABLE

The table has a row for each difference that is meant: `cases | what they come to in the second | why`, with * for any text.
Printed is a line for each case that differs and is in no row, for each that is in a row and does not differ, and for each
row that has no case; and at the end what the first directory answered, and how often.

A case is what a call came to, and what is to be seen afterwards. No case looks at a clock's value, and none at the time of a
read: mounts say whether that is kept."""

import fnmatch
import os
import shutil
import sys
import time

import contents
import names
import rights
import tools

# Each has told `tools` its cases.
assert contents and names and rights


def run(top):
    """All cases below a directory: what became of each."""
    shutil.rmtree(top, ignore_errors=True)
    os.makedirs(top)
    os.chmod(top, 0o755)
    tools.counter = tools.itertools.count()
    home = os.open(top, os.O_RDONLY)
    results = {}
    for cases in tools.families:
        tools.begin(home, cases)
        for name, said in cases():
            name = f"{cases.__name__}/{name}"
            assert name not in results, name
            results[name] = said
    os.fchdir(home)
    os.close(home)
    return results


def compare(expected, found, rows):
    """What is not as the rows say."""
    wrong, used = [], set()
    for name, said in expected.items():
        row = next((row for row in rows if fnmatch.fnmatchcase(name, row[0])), None)
        used.add(row)
        if said == found[name]:
            if row:
                wrong.append(f"does not differ: {name} | {said}")
        elif not row or not fnmatch.fnmatchcase(found[name], row[1]):
            wrong.append(f"differs: {name} | {said} | {found[name]}")
    return wrong + [f"has no case: {' | '.join(row)}" for row in rows if row not in used]


def main():
    # It would be no proof if it did not see these.
    assert compare({"a": "x"}, {"a": "x"}, []) == []
    assert compare({"a": "x"}, {"a": "y"}, [("a", "y", "")]) == []
    for rows, found in (([], "y"), ([("a", "z", "")], "y"), ([("a", "y", "")], "x"), ([("b", "y", "")], "x")):
        assert len(compare({"a": "x"}, {"a": found}, rows)) == 1, (rows, found)
    with open(sys.argv[3]) as table:
        rows = [tuple(part.strip() for part in line.split(" | ")) for line in table if line.strip() and line[0] != "#"]
    os.umask(0o022)
    began = time.monotonic()
    expected = run(sys.argv[1])
    between = time.monotonic()
    found = run(sys.argv[2])
    assert expected.keys() == found.keys()
    wrong = compare(expected, found, rows)
    print("\n".join(wrong))
    answers = {}
    for said in expected.values():
        first = said.split(";")[0].split()[0]
        answers[first] = answers.get(first, 0) + 1
    counts = " ".join(f"{name}:{count}" for name, count in sorted(answers.items()) if name == "ok" or name[0] == "E")
    print(f"{len(expected)} cases, {len(wrong)} not as they should be: {counts}")
    print(f"{between - began:.1f} s and {time.monotonic() - between:.1f} s")
    sys.exit(bool(wrong))


main()
