"""Which tests share costly processes or trained runs, and so run in one process of pytest."""

from __future__ import annotations

import re

# The longest groups start first. `children` are forked from the server of tests/tiny.py, whose
# start takes ten seconds; rules about the source share the parsed files. A file of `others` is a
# group of its own.
SHARING = {
    "ray": r"cluster/(?!test_hang.py::test_one)|faults/.*(on_ray|\[ray)",
    "children": r"same/|house/|cluster/test_hang|adapters/test_run|api/test_(ranks|resume)"
    r"|checkpoint/test_(background|control|disk|kill|store)|docs/test_(pages|size)"
    r"|health/test_answers_at_end|model/test_(export|head|towers|vision_layouts)"
    r"|reference/test_resume|security/test_(page|readers|secrets|terminal)|train/test_(nonfinite|resume|signals)",
    "fork_server": r"faults/",
    "health": r"health/",
    "board": r"board/",
    "commands": r"commands/",
    "others": "",
}
GROUPS = list(SHARING)


def group_of(test: str) -> str:
    """Return the group of a test or of a file, named from the root of the repository."""
    path = test.removeprefix("tests/")
    return next(group for group, pattern in SHARING.items() if re.match(pattern, path))
