# Reads its capabilities, and whether new programs may add to them.
# prints: (0, 0, 0) 1
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
low_and_high = zip(data[:3], data[3:], strict=True)
GET_NO_NEW_PRIVS = 39
print(tuple(low | high for low, high in low_and_high), libc.prctl(GET_NO_NEW_PRIVS, 0, 0, 0, 0))
