"""How kernels without fast arithmetic are compiled, and calls of LLVM's own functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kvbench.kernels import compiled

kernel = compiled.kernel(error_model="numpy")
inner = compiled.inner(error_model="numpy")


def called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A call of one of LLVM's own functions."""
    of = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(
        builder.module.globals.get(name) or ir.Function(builder.module, of, name), arguments
    )
