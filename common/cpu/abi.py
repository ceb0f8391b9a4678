"""The structures of runtime.h, for ctypes."""

from ctypes import Structure, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint32, c_uint64, c_void_p


class Place(Structure):
    _fields_ = [("file", c_char_p), ("line", c_int), ("pc", c_size_t)]


class Finding(Structure):
    _fields_ = [("kind", c_int), ("fatal", c_int), ("here", Place), ("there", Place), ("array", c_int),
                ("size", c_int), ("write", c_int), ("other_write", c_int), ("offset", c_int64), ("block", c_int64),
                ("other_block", c_int64), ("thread", c_int), ("other_thread", c_int), ("count", c_int64),
                ("note", c_char * 96)]


class Standing(Structure):
    _fields_ = [("thread", c_int), ("state", c_int), ("running", c_int), ("here", Place)]


class Launch(Structure):
    _fields_ = [("entry", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("args", c_void_p),
                ("arena_bytes", c_size_t), ("dynamic_offset", c_size_t), ("dynamic_bytes", c_size_t)]


class Watched(Structure):
    _fields_ = [("space", c_int), ("writable", c_int), ("base", c_int64), ("size", c_int64)]


class Request(Structure):
    _fields_ = [("lanes", c_uint32), ("offset", c_uint32 * 32), ("cost", c_int), ("ideal", c_int)]


class Counts(Structure):
    _fields_ = [("pc", c_size_t), ("op", c_int), ("space", c_int), ("size", c_int), ("arrays", c_uint64),
                ("requests", c_int64), ("bytes", c_int64), ("cost", c_int64), ("ideal", c_int64),
                ("first", Request), ("worst", Request)]


# Of enum Kind only those that are treated specially; trace.MESSAGES lists all, in order.
STACK_OVERFLOW, FAULT, DIVISION, PAST_THE_END, OUT_OF_BOUNDS = 5, 6, 7, 9, 12
READY, AT_BARRIER, IN_WARP, DONE = range(4)
SPACES, OPS = ("global", "shared"), ("load", "store", "atomic")
