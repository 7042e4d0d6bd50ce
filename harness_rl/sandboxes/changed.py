"""What a session changed of the programs that its image brought. Invariant: whatever the shell, the loader or Python would find first or
load by itself is either what the image holds, or named here.

Two trees are compared: the overlay's upper folder, which holds exactly what the session wrote, removed or replaced, and the image as it
was. Below the folders of programs everything counts that the image had and that is not the same any more: files, links, removed entries,
folders put in the place of others. What is new counts only where it takes the place of something: in front of a program in PATH, in front
of a Python module, a `.pth` file and its kind. So packages may be installed, as long as they replace nothing.

It runs outside of the sandbox as the host's root on a tree of the agent's: it opens folders and plain files only, and follows no link."""

from __future__ import annotations

import os
import stat

from .loader import same_libraries

_SYSTEM = ("usr", "opt", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DATA = ("usr/share/doc", "usr/share/info", "usr/share/man", "usr/share/mime", "usr/share/applications", "usr/share/icons", "usr/src")
"""Below the system's folders, but nothing that runs; installing a package rewrites indexes there."""
_ETC = (
    "ld.so.preload", "ld.so.cache", "passwd", "nsswitch.conf", "alternatives", "perl", "ssl/openssl.cnf", "gitconfig", "environment",
    "profile", "profile.d", "bash.bashrc",
)  # fmt: skip
"""Of /etc, what programs load code from or by itself; the rest is configuration that a task may ask to change. `python*` counts too."""
_ALWAYS = frozenset({"pyvenv.cfg", "pybuilddir.txt", "sitecustomize.py", "usercustomize.py", "sitecustomize.pl"})
"""New files that move an interpreter's library or run at its start, wherever they are."""
_ETC_NEW = frozenset({"ld.so.preload", "gitconfig"})
_TEST_SETTINGS = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg"})
"""In the root folder pytest takes them for those of /tests."""
_IMPORTED = (
    "usr/lib/python3*", "usr/lib/python3*/lib-dynload", "usr/local/lib/python3*", "usr/local/lib/python3*/lib-dynload",
    "root/.local/lib/python3*/site-packages", "home/*/.local/lib/python3*/site-packages", "usr/local/lib/python3*/dist-packages",
    "usr/local/lib/python3*/site-packages", "usr/lib/python3*/dist-packages",
)  # fmt: skip
"""Where Python looks for modules, the first first."""
_MODULES = ("py", "so", "pyc")
_SMALL = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Changes:
    """`find()` fills `replaced` with paths and `caches` with compiled modules that are new, which the caller is to remove: nobody can
    tell those that Python wrote from those that the agent did."""

    def __init__(self, upper: int, image: int, search: list[str], work: str) -> None:
        """`upper` and `image` are descriptors of the two trees, `search` the folders of PATH, `work` the agent's own folder."""
        self.replaced: list[str] = []
        self.caches: list[str] = []
        self._upper, self._image = upper, image
        self._search = list(dict.fromkeys(folder.strip("/") for folder in search if folder.startswith("/")))
        work = work.strip("/")
        # A task may work in /opt/app; one that works in all of /usr gets no such exception.
        self._work = work if work.count("/") else None
        self._at_root = not work

    def find(self) -> None:
        self._compare(self._upper, self._image, "")
        self._check_path()
        self._check_imports()
        self.replaced = list(dict.fromkeys(self.replaced))

    def _add(self, path: str, why: str = "") -> None:
        self.replaced.append(f"/{path}{f' ({why})' if why else ''}")

    def _compare(self, upper: int, image: int, path: str, hidden: bool = False) -> None:
        """Walk both trees where both have a folder; its depth is bounded by the image's. `hidden`: the upper folder shows nothing of the
        image's."""
        names = os.listdir(upper)
        stems = _stems(image) if names else set()
        for name in {*names, *(os.listdir(image) if hidden else ())}:
            below = f"{path}/{name}" if path else name
            if self._ignored(below):
                continue
            now, was = _stat(upper, name), _stat(image, name)
            if was is None:
                if now is not None:
                    self._check_new(below, name, now, stems)
            elif now is not None and stat.S_ISDIR(now.st_mode) and stat.S_ISDIR(was.st_mode):
                self._descend(upper, image, name, below, hidden)
                if self._belongs(below) and was.st_mode & ~now.st_mode & 0o555:
                    self._add(below, "closed")
            elif now is None or not self._same(upper, image, name, below, now, was):
                self._add(below)

    def _descend(self, upper: int, image: int, name: str, path: str, hidden: bool) -> None:
        ours = os.open(name, _FOLDER, dir_fd=upper)
        theirs = os.open(name, _FOLDER, dir_fd=image)
        try:
            if _marked(ours, "redirect"):
                self._add(path, "another folder")
            else:
                self._compare(ours, theirs, path, hidden or _marked(ours, "opaque"))
        finally:
            os.close(ours)
            os.close(theirs)

    def _ignored(self, path: str) -> bool:
        if self._work is not None and (path == self._work or path.startswith(f"{self._work}/")):
            return True
        if any(f"{path}/".startswith(f"{folder}/") or folder.startswith(f"{path}/") for folder in self._search):
            return False
        return not (path in _TEST_SETTINGS or _programs(path) or _above_programs(path))

    def _belongs(self, path: str) -> bool:
        return _programs(path) or path in ("etc", *self._search)

    def _check_new(self, path: str, name: str, now: os.stat_result, stems: set[str]) -> None:
        """A new entry in a folder of the image's."""
        if _whiteout(now):
            return
        folder = os.path.dirname(path)
        suffix = name.rpartition(".")[2]
        if folder == "":
            if name in _TEST_SETTINGS and not self._at_root:
                self._add(path, "new")
        elif name == "__pycache__" or (suffix == "pyc" and os.path.basename(folder) == "__pycache__"):
            self.caches.append(path)
        elif (
            name in _ALWAYS
            or (folder == "etc" and name in _ETC_NEW)
            or folder == "etc/profile.d"
            or (folder in ("usr/lib", "usr/local/lib") and name.startswith("python3") and suffix == "zip")
            or (suffix == "so" and name.partition(".")[0] in stems)
            or (stat.S_ISDIR(now.st_mode) and name in stems)
        ):
            self._add(path, "new")

    def _same(self, upper: int, image: int, name: str, path: str, now: os.stat_result, was: os.stat_result) -> bool:
        if stat.S_IFMT(now.st_mode) != stat.S_IFMT(was.st_mode):
            return False
        if stat.S_ISLNK(now.st_mode):
            return os.readlink(name, dir_fd=upper) == os.readlink(name, dir_fd=image)
        if not stat.S_ISREG(now.st_mode) or (now.st_mode, now.st_uid, now.st_gid) != (was.st_mode, was.st_uid, was.st_gid):
            return False
        if path == "etc/passwd":  # accounts may be added: the first line of a name counts
            old = _read(image, name)
            return _read(upper, name).startswith(old) and old.endswith(b"\n")
        if path == "etc/ld.so.cache" and same_libraries(_read(image, name), _read(upper, name)):
            return True
        return now.st_size == was.st_size and _equal(upper, image, name)

    def _check_path(self) -> None:
        """New programs under a name that a later folder of PATH has."""
        known = [_names(self._image, folder, follow=True) for folder in self._search]
        for rank, folder in enumerate(self._search):
            for name in self._new_names(folder):
                if any(name in names for names in known[rank + 1 :]):
                    self._add(f"{folder}/{name}", "in front of another")

    def _check_imports(self) -> None:
        """New modules under a name that a later folder has, and files that Python's start or pytest's loads by itself."""
        folders = [(folder, rank) for rank, pattern in enumerate(_IMPORTED) for folder in self._matching(pattern)]
        known: dict[int, set[str]] = {}
        for folder, rank in folders:
            known.setdefault(rank, set()).update(name.partition(".")[0] for name in _names(self._image, folder, follow=True))
        for folder, rank in folders:
            later = set().union(*(stems for other, stems in known.items() if other > rank))
            for name in self._new_names(folder):
                stem, _, rest = name.partition(".")
                if rest.rpartition(".")[2] == "pth" or stem in ("sitecustomize", "usercustomize") or self._plugin(folder, name):
                    self._add(f"{folder}/{name}", "loaded by itself")
                elif stem in later and stem != "__pycache__" and not name.endswith("-info"):
                    self._add(f"{folder}/{name}", "in front of another")

    def _plugin(self, folder: str, name: str) -> bool:
        """Whether a new distribution says that pytest is to load it."""
        if not name.endswith((".dist-info", ".egg-info")):
            return False
        fd = _open_folder(self._upper, f"{folder}/{name}")
        if fd is None:
            return False
        try:
            return b"pytest11" in _read(fd, "entry_points.txt")
        finally:
            os.close(fd)

    def _new_names(self, folder: str) -> list[str]:
        """Entries of a folder that the image lacks. A link on the way that the image lacks hides where they are, so it counts itself."""
        if self._work is not None and f"{folder}/".startswith(f"{self._work}/"):
            return []
        self._note_link(folder)
        before = _names(self._image, folder, follow=True)
        return sorted(_names(self._upper, folder, follow=False) - before)

    def _note_link(self, folder: str) -> None:
        parts = folder.split("/")
        for count in range(1, len(parts) + 1):
            path = "/".join(parts[:count])
            parent = _open_folder(self._upper, os.path.dirname(path))
            if parent is None:
                return
            try:
                now = _stat(parent, parts[count - 1])
            finally:
                os.close(parent)
            if now is None:
                return
            if not stat.S_ISDIR(now.st_mode):
                if stat.S_ISLNK(now.st_mode) and _lstat(self._image, path) is None:
                    self._add(path, "a link")
                return

    def _matching(self, pattern: str) -> list[str]:
        """Folders of either tree that a pattern names; a link counts too, so that it is noticed."""
        found = [""]
        for part in pattern.split("/"):
            step: list[str] = []
            for folder in found:
                if "*" not in part:
                    names = {part}
                else:
                    self._note_link(folder)
                    names = _names(self._upper, folder, follow=False) | _names(self._image, folder, follow=False)
                    names = {name for name in names if name.startswith(part[:-1])}
                step += [f"{folder}/{name}" if folder else name for name in sorted(names)]
            found = step
        return found


def _programs(path: str) -> bool:
    """Whether a path belongs to what is compared."""
    top, _, rest = path.partition("/")
    if any(f"{path}/".startswith(f"{folder}/") for folder in _DATA):
        return False
    if top == "etc":
        return rest.startswith("python") or any(f"{rest}/".startswith(f"{name}/") for name in _ETC)
    if top == "home":
        rest = rest.partition("/")[2]
    # Beside these two, a home's .local holds data, some of it the agent program's own.
    return top in _SYSTEM or (top in ("root", "home") and f"{rest}/".startswith((".local/bin/", ".local/lib/")))


def _above_programs(path: str) -> bool:
    """Whether a folder holds something that belongs to it."""
    top, _, rest = path.partition("/")
    return (
        path in ("etc", "root", "home", "root/.local")
        or (top == "home" and ("/" not in rest or rest.partition("/")[2] == ".local"))
        or (top == "etc" and any(name.startswith(f"{rest}/") for name in _ETC))
    )


def _marked(fd: int, mark: str) -> bool:
    """Whether an upper folder bears an overlay's mark: `opaque` hides the image's folder, `redirect` shows another one instead."""
    try:
        os.getxattr(fd, f"trusted.overlay.{mark}")
    except OSError:
        return False
    return True


def _whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _stat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _lstat(root: int, path: str) -> os.stat_result | None:
    parent = _open_folder(root, os.path.dirname(path))
    if parent is None:
        return None
    try:
        return _stat(parent, os.path.basename(path))
    finally:
        os.close(parent)


def _open_folder(root: int, path: str, follow: bool = False) -> int | None:
    """A folder below `root` without following links; `follow`, for the image only, takes a link of its root folder such as bin."""
    fd = os.dup(root)
    parts = [part for part in path.split("/") if part]
    for depth, part in enumerate(parts):
        try:
            below = os.open(part, _FOLDER, dir_fd=fd)
        except OSError:
            aim = _link(fd, part) if follow and depth == 0 else None
            os.close(fd)
            if aim is None or aim.startswith("/") or ".." in aim:
                return None
            return _open_folder(root, "/".join([aim, *parts[1:]]))
        os.close(fd)
        fd = below
    return fd


def _link(folder: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def _names(root: int, path: str, *, follow: bool) -> set[str]:
    """Entries of a folder, none if it is not there; removed ones are not entries."""
    fd = _open_folder(root, path, follow)
    if fd is None:
        return set()
    try:
        return {name for name in os.listdir(fd) if (info := _stat(fd, name)) is not None and not _whiteout(info)}
    finally:
        os.close(fd)


def _stems(folder: int) -> set[str]:
    """Modules of a folder that are files: Python takes a folder or a compiled module of the same name first."""
    return {name.partition(".")[0] for name in os.listdir(folder) if name.rpartition(".")[2] in _MODULES}


def _read(folder: int, name: str) -> bytes:
    """A small plain file's content; empty if it is something else."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        return file.read(_SMALL) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _equal(upper: int, image: int, name: str) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(name, flags, dir_fd=upper), "rb") as ours, open(os.open(name, flags, dir_fd=image), "rb") as theirs:
        while True:
            chunk = ours.read(_SMALL)
            if chunk != theirs.read(_SMALL):
                return False
            if not chunk:
                return True
