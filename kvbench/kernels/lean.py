"""What Numba compiles for kernels alone is not optimised, nor made into machine code, by itself.

Numba does both for each function, and again wherever it is called from: its own library's, and
those that only kernels call, are half of the time. Here they are linked as they are into the
kernel, which is optimised as a whole and in which they are nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target

_WRAPPER, _OF_NUMBA = "_ZN7cpython", "_ZN7cpython5numba"
_ENVIRONMENT = "_ZN08NumbaEnv"


class _Lean(JITCodeLibrary):  # type: ignore[misc]
    def _is_called(self) -> bool:
        """Whether Python calls a function of it other than Numba's own, or it is read from disk."""
        return self._shared_module is not None or any(
            function.name.startswith(_WRAPPER) and not function.name.startswith(_OF_NUMBA)
            for function in self._final_module.functions
            if not function.is_declaration
        )

    def _optimize_final_module(self) -> None:
        if not self._is_called():
            return
        for function in self._final_module.functions:
            # Names of functions are numbered by each process: what another one compiled may have
            # the same name here, and mean another function. What is private has no name in what is
            # compiled.
            if function.linkage == llvm.Linkage.linkonce_odr:
                function.linkage = llvm.Linkage.private
        super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if self._is_called():
            super()._finalize_final_module()
            return
        self._finalize_dynamic_globals()
        self._finalized = True
        engine = self._codegen._engine
        # Numba writes to it, though nothing here reads it
        for variable in self._final_module.global_variables:
            if variable.name.startswith(_ENVIRONMENT) and not engine.is_symbol_defined(
                variable.name
            ):
                engine.add_module(
                    llvm.parse_assembly(f'@"{variable.name}" = common global ptr null')
                )


@contextmanager
def lean() -> Iterator[None]:
    """Compile so in this block. Numba's lock must be held."""
    codegen: Any = cpu_target.target_context.codegen()
    before = codegen._library_class
    codegen._library_class = _Lean
    try:
        yield
    finally:
        codegen._library_class = before
