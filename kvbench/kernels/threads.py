"""Compiled work in the threads that torch computes in.

Torch's OpenMP threads spin between two steps of a model, so that a parallel region of some
microseconds is worth while; a thread of our own would sleep, and its waking takes longer than most
layers' attention. Regions are opened by torch's own OpenMP where that is GNU's, as in its Linux
wheels. Elsewhere one thread does all the work.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_OPEN, _NUMBER = "kvbench_open_region", "kvbench_number_in_region"
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _open_alone(body: int, data: int, threads: int, flags: int) -> None:
    _BODY(body)(data)


@ctypes.CFUNCTYPE(ctypes.c_int)
def _number_alone() -> int:
    return 0


def _name_functions() -> None:
    """Tell LLVM what compiled code calls; it finds them by these names, whenever that was
    compiled.
    """
    libraries = [*(Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
    gnu = ctypes.CDLL(str(libraries[0])) if libraries else None
    functions = (
        (_open_alone, _number_alone) if gnu is None else (gnu.GOMP_parallel, gnu.omp_get_thread_num)
    )
    for name, function in zip((_OPEN, _NUMBER), functions, strict=True):
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        binding.add_symbol(name, address)


_name_functions()


@intrinsic
def in_threads(typing, threads, work, arguments):  # type: ignore[no-untyped-def]
    """work(number, *arguments) in so many threads, this one among them; each has a number from 0
    on.

    Ends when all have. Fewer may come, so `work` shares itself out by what is left to do. It
    returns nothing, and what it raises is lost.

    Parameters
    ----------
    threads
        intp.
    work
        a compiled function.
    arguments
        a tuple.
    """
    of = types.intp, *arguments.types
    work.get_call_type(typing, of, {})
    compiled = work.dispatcher.overloads[of]

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        threads, packed = values[0], values[2]
        context.active_code_library.add_linking_library(compiled.library)
        module, byte = builder.module, ir.IntType(8).as_pointer()
        body = ir.Function(
            module, ir.FunctionType(ir.VoidType(), [byte]), module.get_unique_name("kvbench_body")
        )
        body.linkage = "internal"
        inside = ir.IRBuilder(body.append_basic_block())
        number_of = cgutils.get_or_insert_function(
            module, ir.FunctionType(ir.IntType(32), []), _NUMBER
        )
        number = inside.sext(inside.call(number_of, []), ir.IntType(64))
        tuple_type = signature.args[2]
        loaded = inside.load(inside.bitcast(body.args[0], packed.type.as_pointer()))
        call_arguments = [
            number,
            *(inside.extract_value(loaded, at) for at in range(len(tuple_type.types))),
        ]
        context.call_internal_no_propagate(
            inside, compiled.fndesc, compiled.signature, call_arguments
        )
        inside.ret_void()
        opening = ir.FunctionType(ir.VoidType(), [body.type, byte, ir.IntType(32), ir.IntType(32)])
        open_region = cgutils.get_or_insert_function(module, opening, _OPEN)
        place = cgutils.alloca_once_value(builder, packed)
        count = builder.trunc(threads, ir.IntType(32))
        builder.call(open_region, [body, builder.bitcast(place, byte), count, ir.IntType(32)(0)])
        return context.get_dummy_value()

    return types.void(types.intp, work, arguments), generate


@intrinsic
def claim(_context, counter):  # type: ignore[no-untyped-def]
    """The number at int64 counter [1], which grows by one: no two threads get the same."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        of = signature.args[0]
        data = context.make_array(of)(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.IntType(64)(1), "monotonic")

    return types.intp(counter), generate
