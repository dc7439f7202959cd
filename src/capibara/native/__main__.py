"""``python -m capibara.native``: build the library in place and load it."""

import sys

from capibara.native import library
from capibara.native.build import NativeBuildError, build


def main() -> int:
    try:
        print(f"built {build()}")
    except (NativeBuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    reason = library.problem()
    print(reason or f"it loads; instruction set {library.isa()}")
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
