"""The shape of the code: who imports whom, what is asked of solvers, and who may send messages.

Everything is read from the sources, so imports inside functions, conditions and ``TYPE_CHECKING`` blocks count, and so do
those by a name, ``importlib.import_module(f"benchmarks.{name}")``.
"""

import ast
import collections
import functools
import re
from pathlib import Path

import house

ROOT = Path(__file__).resolve().parents[2]

FLOORS = ["_arrays", "_comms", "_levels", "_solvers", "_choice", "_programs", "core"]
"""The house, from the ground up: a module imports from its own floor and from those below. "core" is the modules directly
in lp_jax, what users call."""

# What a package may import besides itself. "lp_jax" is the names that it exports.
LAYERS = {
    **{floor: set(FLOORS[:number]) for number, floor in enumerate(FLOORS)},
    "planning": {*FLOORS},
    "lp_jax": {*FLOORS, "planning"},
    "data": {"_arrays"},
    "nn": {*FLOORS, "lp_jax"},
    "train": {*FLOORS, "planning", "lp_jax", "nn"},
    "viz": {*FLOORS, "planning", "lp_jax"},
    "cli": {*FLOORS, "planning", "lp_jax", "data", "nn", "train", "viz"},
    "benchmarks": {*FLOORS, "planning", "lp_jax", "data", "nn", "train", "viz", "cli"},
    "command": {*FLOORS, "planning", "lp_jax", "data", "nn", "train", "viz", "cli", "benchmarks"},
}

COMMAND = {"lp_jax.__main__", "lp_jax.cli", "lp_jax.cli._commands"}
"""The entry of the program, above all that it can start."""

MESSAGES = {"ppermute", "pcast", "psum", "all_gather", "all_to_all", "sendrecv"}


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The syntax tree of each module, by the module's name."""
    paths = [*ROOT.glob("lp_jax/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in paths}
    return {
        ".".join(p[:-1] if p[-1] == "__init__" else p): ast.parse(path.read_text())
        for path, p in parts.items()
    }


def nodes(kind):
    """Every node of a kind (or kinds), with the module that holds it."""
    return [
        (name, node)
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, kind)
    ]


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules of ours that each module imports; a name from a package counts as its submodule where it is one."""
    found: dict[str, set[str]] = {name: set() for name in sources()}
    for name, node in nodes(ast.Import):
        found[name] |= {alias.name for alias in node.names}
    for name, node in nodes(ast.ImportFrom):
        assert node.level == 0, f"{name}, line {node.lineno}: relative import"
        whole = {f"{node.module}.{alias.name}" for alias in node.names}
        found[name] |= {w if w in sources() else node.module for w in whole}
    for name, node in nodes(ast.Call):
        if called(node.func) == "import_module" and node.args:
            meant = {module for module in sources() if re.fullmatch(by_name(node.args[0]), module)}
            found[name] |= {
                module for module in meant if not module.startswith(f"{name}.")
            }  # its own, as an attribute
    return {name: uses & set(sources()) for name, uses in found.items()}


def by_name(node: ast.AST) -> str:
    """A pattern of the modules that an expression may name; no module for one that is not known before it runs."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    known = [re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+" for part in parts]
    return "".join(known) if isinstance(parts[0], ast.Constant) else ""


def layer(module: str) -> str:
    """The package of a module, as LAYERS calls it."""
    if module in COMMAND:
        return "command"
    first, *rest = module.split(".")
    if first == "benchmarks" or not rest:
        return first
    return rest[0] if f"lp_jax.{rest[0]}" in packages() else "core"


@functools.cache
def packages() -> set[str]:
    return {name.rpartition(".")[0] for name in sources()}


def test_imports_form_a_dag():
    """All modules can be read in one order, each using only those before it."""
    reach = imports()
    while (
        wider := {name: uses.union(*(reach[u] for u in uses)) for name, uses in reach.items()}
    ) != reach:
        reach = wider
    circles = [
        f"{name} imports {used}"
        for name, uses in imports().items()
        for used in uses
        if name in reach[used]
    ]
    assert not circles, "\n".join(["", *sorted(circles)])


def test_imports_by_a_name_are_seen():
    assert {"benchmarks.single", "lp_jax.cli._demo"} <= imports()["lp_jax.cli._commands"]


def test_no_package_imports_one_above_it():
    upwards = [
        f"{name} imports {used}"
        for name, uses in imports().items()
        for used in uses
        if layer(used) != layer(name) and layer(used) not in LAYERS[layer(name)]
    ]
    assert not upwards, sorted(upwards)


def test_the_table_of_layers_is_whole():
    assert {layer(name) for name in sources()} == set(LAYERS)


# --- classes --------------------------------------------------------------------------------------------------------


def called(node: ast.AST) -> str:
    """The last name of a name, attribute or subscript."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )


@functools.cache
def bases() -> dict[str, set[str]]:
    """The bases of each class, by names; several that share a name count as one."""
    return {node.name: {called(base) for base in node.bases} for _, node in nodes(ast.ClassDef)}


@functools.cache
def concrete_solvers() -> set[str]:
    found = {"Rediscretize", "Solver"}
    while more := {name for name, above in bases().items() if above & found} - found:
        found |= more
    return found - {"Solver"}


def is_type_of(node: ast.AST) -> bool:
    """Whether an expression is `type(x)`, `x.__class__` or the name of either."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__" or (
            node.attr in ("__name__", "__qualname__") and is_type_of(node.value)
        )
    return isinstance(node, ast.Call) and called(node.func) == "type" and len(node.args) == 1


def asked(node: ast.AST) -> ast.AST | None:
    """What a node compares the class of a value with, where it does so."""
    if isinstance(node, ast.Call) and called(node.func) in ("isinstance", "issubclass"):
        return node.args[1]
    if isinstance(node, ast.MatchClass):
        return node.cls
    if isinstance(node, ast.Compare) and any(
        is_type_of(side) for side in (node.left, *node.comparators)
    ):
        return node
    if isinstance(node, ast.Subscript) and is_type_of(node.slice):
        return node.value
    return None


def questions() -> list[str]:
    """Where the code asks whether a solver is of one class, outside the module of that class."""
    found, home = [], {node.name: name for name, node in nodes(ast.ClassDef)}
    for name, node in nodes((ast.Call, ast.MatchClass, ast.Compare, ast.Subscript)):
        parts = list(ast.walk(asked(node) or ast.Pass()))
        meant = {called(n) for n in parts} | {n.value for n in parts if isinstance(n, ast.Constant)}
        if hits := {cls for cls in meant & concrete_solvers() if home[cls] != name}:
            found.append(f"{name}, line {node.lineno}: {' '.join(sorted(hits))}")
    return found


def test_the_solvers_are_found():
    assert {"MGRIT", "Picard", "Newton", "Serial", "Rediscretize"} <= concrete_solvers()


def test_nobody_asks_which_solver_it_has():
    """A method of `Solver` answers, or a function registered for a class: one from outside works like one from inside."""
    assert not questions(), "\n".join(["", *questions()])


def test_classes_are_abstract_or_final():
    """None is both subclassed and instantiated, of those that have a name of their own."""
    names = collections.Counter(node.name for _, node in nodes(ast.ClassDef))
    instantiated = {called(node.func) for _, node in nodes(ast.Call)}
    subclassed = {ast.unparse(base) for _, node in nodes(ast.ClassDef) for base in node.bases}
    both = subclassed & instantiated & {name for name, number in names.items() if number == 1}
    assert not both, sorted(both)


# --- what is used ---------------------------------------------------------------------------------------------------


def test_jax_is_used_by_its_public_names():
    """Messages of mpi4jax are an effect, and what an effect may be in has no public name."""
    (allowed,) = (
        f"{name}, line {node.lineno}"
        for name, node in nodes(ast.ImportFrom)
        if name == "lp_jax._comms._mpi" and ast.unparse(node) == "from jax._src import effects"
    )
    found = [
        f"{name}, line {node.lineno}"
        for name, node in nodes((ast.Attribute, ast.Import, ast.ImportFrom))
        if (isinstance(node, ast.Attribute) and node.attr == "_src" and called(node.value) == "jax")
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"))
        or (
            not isinstance(node, ast.Attribute)
            and any(a.name in ("_src", "jax._src") for a in node.names)
        )
    ]
    assert found == [allowed]


def test_values_reach_other_workers_in_one_place():
    """The engines of mesh and ranks send, and the copies of `lp-jax demo` their gradients; the others ask a comm.

    What says that numbers vary within a user's ``shard_map`` sends nothing itself; its transpose is one sum.
    """
    allowed = {"lp_jax._comms._mesh", "lp_jax._comms._mpi", "lp_jax.cli._demo"}
    found = [
        f"{name}, line {node.lineno}: {called(node)}"
        for name, node in nodes((ast.Attribute, ast.Name))
        if called(node) in MESSAGES
        and name.startswith("lp_jax.")
        and name not in allowed
        and (name, called(node)) != ("lp_jax._arrays._jaxpr", "pcast")
    ]
    assert not found


def test_every_floor_says_what_it_is_for():
    for number, floor in enumerate(FLOORS[:-1], 1):
        assert ast.get_docstring(sources()[f"lp_jax.{floor}"]).startswith(f"Floor {number}: ")


def test_modules_are_small():
    """Private modules of the library; a reader takes one in at a sitting."""
    sizes = {
        str(path.relative_to(ROOT)): house.tokens_of(path.read_text())
        for path in ROOT.glob("lp_jax/**/_*.py")
    }
    assert not {path: tokens for path, tokens in sizes.items() if tokens > 3_900}


def test_no_line_of_code_is_over_100_columns():
    paths = sorted(ROOT.glob("lp_jax/**/*.py"))
    wide = {str(path): house.wide_lines(path.read_text()) for path in paths}
    assert not {path: lines for path, lines in wide.items() if lines}


def test_the_package_does_not_grow():
    """Lower the ceilings when something is taken out; do not raise them.

    ``python tests/helpers/house.py`` prints all sizes.
    """
    sizes = house.sizes()
    assert sizes["tokens of code in lp_jax"] <= 134_370, sizes
    assert sizes["tokens of code in the core"] <= 73_160, sizes
