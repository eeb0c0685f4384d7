"""`python restricted.py FILE ARGUMENTS` runs `python ARGUMENTS` with none but the system calls in FILE, and without
memory that is both writable and executable: what SystemCallFilter= and MemoryDenyWriteExecute= of systemd do."""

import ctypes
import errno
import os
import sys
from pathlib import Path

PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM

libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0) != 0:
    sys.exit("this kernel has no PR_SET_MDWE")

seccomp = ctypes.CDLL("libseccomp.so.2")
seccomp.seccomp_init.restype = ctypes.c_void_p
filters = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(REFUSE)))
for name in Path(sys.argv[1]).read_text().split():
    number = seccomp.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:  # of this architecture
        seccomp.seccomp_rule_add(filters, ctypes.c_uint32(ALLOW), number, 0)
if seccomp.seccomp_load(filters) != 0:
    sys.exit("the filter cannot be loaded")
os.execv(sys.executable, [sys.executable, "-P", *sys.argv[2:]])
