"""The one thing C++ cannot be taught by a header: `__shared__`.

A shared array belongs to the block, not to the thread, so each declaration becomes a reference into the block's
arena, on the same line:

    __shared__ float Ks[Bc][d];     typedef float Ks_[Bc][d]; Ks_ &Ks = cpu::shared<Ks_, 0, 1>();
    extern __shared__ float x[];    float *const x = (float *)cpu::dynamic_arena;

A declaration that this cannot parse is an error with its line: a `__shared__` that silently became a private or a
global array would run, and be wrong.
"""

import re
from dataclasses import dataclass


class CompileError(RuntimeError):
    """The source does not compile. The message starts with the place: `stages/stage4_tiled.cu:12: …`."""


@dataclass(frozen=True)
class SharedArray:
    name: str
    file: str
    line: int
    dynamic: bool        # declared `extern __shared__ T x[]`
    function: str        # the function it is declared in


def blank(text):
    """`text` with comments and string contents replaced by spaces: same length, same lines."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)


def place(text, at, default="kernel.cu"):
    """The (file, line) that a compiler would name for position `at`, `#line` heeded."""
    file, line = default, 1
    for row in text[:at].split("\n")[:-1]:
        m = re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', row)
        line = int(m[1]) if m else line + 1
        file = m[2] if m and m[2] else file
    return file, line


def _closing(code, at):
    """Position just behind the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth == 0:
            return i + 1
    return len(code)


@dataclass(frozen=True)
class Function:
    name: str
    kernel: bool
    extern: bool         # extern "C": its name alone is enough to find it
    parameters: int      # where they start in the text
    body: int            # where its body starts and ends
    end: int


def functions(code) -> list[Function]:
    """The functions defined in blanked source."""
    found, at = [], 0
    macros = dict(re.findall(r"^\s*#\s*define\s+(\w+)\b(.*)$", code, flags=re.M))
    for m in re.finditer(r"(\w+)\s*(\()", code):
        if m.start() < at or m[1] in ("__launch_bounds__", "__align__", "alignas", "__attribute__"):
            continue
        end = _closing(code, m.start(2))
        body = re.compile(r"(?:\s|const|noexcept)*(\{)").match(code, end)
        if body:
            at = _closing(code, body.start(1))
            head = code[max(code.rfind(c, 0, m.start()) for c in ";}{") + 1 : m.start()]
            head = re.sub(r"^\s*#.*$", "", head, flags=re.M)
            words = set(re.findall(r"\w+", re.sub(r"\w+", lambda w: macros.get(w[0], w[0]), head)))
            found.append(Function(m[1], "__global__" in words, "extern" in words, m.start(2), body.start(1), at))
    return found


def _split(code, separator=","):
    """Split at separators outside brackets (angle brackets count only where they balance)."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(code):
        depth += (c in "([{<") - (c in ")]}>")
        if c == separator and depth == 0:
            parts.append(code[start:i])
            start = i + 1
    return parts + [code[start:]]


def parameters(source, name):
    """The names of a kernel's parameters, or None where the source has no such kernel."""
    code = blank(source)
    for f in functions(code):
        if f.kernel and f.name == name:
            inside = code[f.parameters + 1 : _closing(code, f.parameters) - 1]
            return [re.findall(r"\w+", p)[-1] for p in _split(inside) if p.strip() not in ("", "void")]
    return None


def kernels(source) -> list[Function]:
    """All `__global__` functions of a source."""
    return [f for f in functions(blank(source)) if f.kernel]


def reached(source, name) -> set[str]:
    """The functions of a source that function `name` can call, itself included."""
    code = blank(source)
    calls = {f.name: set(re.findall(r"\w+", code[f.body : f.end])) for f in functions(code)}
    found, new = set(), {name}
    while new:
        found |= new
        new = {f for caller in new for f in calls.get(caller, ()) if f in calls} - found
    return found


def shared(source):
    """Returns (rewritten source, list of SharedArray). The position in the list is the array's number in C++."""
    code, arrays, edits = blank(source), [], []
    inside = functions(code)
    for m in re.finditer(r"\b__shared__\b", code):
        file, line = place(source, m.start())

        def refuse(why, file=file, line=line):
            raise CompileError(f"{file}:{line}: cannot parse this __shared__ declaration: {why}")

        row = code[code.rfind("\n", 0, m.start()) + 1 : m.start()]
        if row.lstrip().startswith("#"):
            refuse("it stands in a preprocessor line; write it where it is used")
        start = begin = max(code.rfind(c, 0, m.start()) for c in ";{}") + 1
        for row in re.finditer(r"^\s*#.*$", code[start : m.start()], flags=re.M):      # a #pragma, say: no semicolon
            begin = start + row.end()
        start = begin
        end, depth = m.end(), 0
        while end < len(code) and not (code[end] == ";" and depth == 0):
            depth += (code[end] in "([{") - (code[end] in ")]}")
            if depth < 0:
                refuse("it is not a statement of its own, ended by a semicolon")
            end += 1
        function = next((f for f in inside if f.body <= start < f.end), None)
        if function is None:
            refuse("it stands outside of every function; move it into the kernel")

        declaration = code[start : m.start()] + " " + code[m.end() : end]
        align = "1"
        found = re.search(r"\b(?:__align__|alignas)\s*(\()", declaration)
        if found:
            close = _closing(declaration, found.start(1))
            align = declaration[found.start(1) : close]
            declaration = declaration[: found.start()] + " " + declaration[close:]
        if "=" in declaration:
            refuse("shared memory has no initialisers")
        dynamic = re.search(r"\bextern\b", declaration) is not None
        declaration = " ".join(re.sub(r"\b(?:extern|static)\b", " ", declaration).split())

        declarators = _split(declaration)
        first = re.match(r"(?P<type>.*?[\s*&>}])(?P<name>\w+)\s*(?P<size>(?:\[.*\])?)$", declarators[0].strip())
        if not first:
            refuse("a type and a name were expected, such as `float Ks[Bc][d]`")
        names = [first["name"]]
        for other in declarators[1:]:
            name = re.match(r"\s*\**\s*(\w+)\s*(?:\[.*\])?\s*$", other)
            names.append(name[1] if name else refuse(f"`{other.strip()}` was expected to be a name with sizes"))
        if "(" in first["type"] and "{" not in first["type"]:
            refuse("pointers to arrays and functions are not understood")
        if dynamic:
            if len(names) > 1 or re.sub(r"\s", "", first["size"]) != "[]":
                refuse("`extern` wants one array without a size, such as `extern __shared__ float x[];`")
            new = f"{first['type']} *const {names[0]} = ({first['type']} *)cpu::dynamic_arena"
        else:
            # The declarators stay as they are, but name types; of each type there is one reference.
            types = declaration
            for name in names:
                types = re.sub(rf"\b{name}\b(?=\s*(?:\[|,|$))", f"{name}_shared", types)
            new = "; ".join([f"typedef {types}", *(f"{n}_shared &{n} = cpu::shared<{n}_shared, {i}, ({align})>()"
                                                   for i, n in enumerate(names, len(arrays)))])
        arrays += [SharedArray(n, file, line, dynamic, function.name) for n in names]
        lead = len(code[start:end]) - len(code[start:end].lstrip())
        newlines = source[start + lead : end].count("\n")
        edits.append((start + lead, end, new + "\n" * newlines))
    for start, end, new in reversed(edits):
        source = source[:start] + new + source[end:]
    return source, arrays
