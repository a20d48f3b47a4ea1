"""python -m tests.fuzz: see harness.py."""

from tests.fuzz.harness import main

raise SystemExit(main())
