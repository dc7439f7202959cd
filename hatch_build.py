"""The package's build step: compiles the native kernels into the wheel where a C++ compiler is at hand.

Without one the wheel is made all the same, and everything in it runs on plain XLA. An editable installation takes the
library that is in the tree if it was built from these sources: compiling it again for each environment takes a minute.
CAPIBARA_REUSE_LIBRARY=1 says the same for a wheel; tests set it.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = "src/capibara/native/build.py"


class NativeKernels(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # By its path: the package itself cannot be imported yet.
        spec = importlib.util.spec_from_file_location("capibara_native_build", Path(self.root) / BUILD)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            reuse = version == "editable" or os.environ.get("CAPIBARA_REUSE_LIBRARY") == "1"
            library: Path = module.LIBRARY if reuse and module.is_current() else module.build()
        except (module.NativeBuildError, OSError) as error:
            self.app.display_warning(f"built without native kernels: {error}")
            return
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        # It talks to XLA, not to the interpreter: one library for every Python.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
