"""python3 tests/tree: see guards.py."""
import sys

import guards

sys.exit(guards.main(sys.argv[1:]))
