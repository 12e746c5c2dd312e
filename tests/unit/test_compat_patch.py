# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A patch set is applied as a whole or not at all, in every process for itself, and undone to the identical objects."""

import functools
import inspect
import os
import subprocess
import sys
import types

import pytest

from afd_dsv4.compat.contract import Change, Drift, DriftKind, Verdict
from afd_dsv4.compat.patch import DriftError, Left, Patch, PatchError, PatchSet

HOME = """
import functools

LIMIT = 7

def free(x, y=1):
    "Adds."
    return x + y

class Base:
    def inherited(self): return "base"

class Derived(Base):
    factor = 2
    def __init__(self, n=3): self.n = n
    def method(self, x): return x * self.factor
    @staticmethod
    def static(x): return x
    @classmethod
    def klass(cls, x): return (cls.__name__, x)
    @property
    def size(self): return self.n
    @size.setter
    def size(self, n): self.n = n
    @functools.cached_property
    def once(self): return [self.n]

class Namespace:
    "As torch's: operators are made when they are first asked for."
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        operator = Operator()
        setattr(self, name, operator)
        return operator

class Operator:
    def __call__(self, x): return x

class Ops:
    space = Namespace()

ops = Ops()
"""


@pytest.fixture
def home(request):
    """A module `home_N` and a function that makes others which import from it by value."""
    made = []

    def make(name: str, source: str) -> types.ModuleType:
        module = types.ModuleType(name)
        sys.modules[name] = module
        made.append(name)
        exec(compile(source, name, "exec"), vars(module))
        return module

    module = make("home", HOME)
    module.make = make
    yield module
    for name in made:
        del sys.modules[name]


def patch(target, make, also=(), leave=(), alone=False):
    return Patch(f"home:{target}", make, "the test wants it", "with the test", also, leave, alone)


def verdict(*targets, drift=()):
    return Verdict(True, tuple(drift), "made-up", frozenset(f"home:{target}" for target in targets))


@pytest.fixture
def applied():
    """Applies a set of patches of these targets; whatever is still applied at the end is undone."""
    sets = []

    def apply(*patches, name="test"):
        one = PatchSet(name, patches)
        sets.append(one)
        one.apply(Verdict(True, (), "made-up", frozenset(patch.recorded_as for patch in patches)))
        return one

    yield apply
    for one in sets:
        one.undo()


def doubled(original):
    return lambda *arguments, **named: (original(*arguments, **named), "patched")


def test_a_function_of_a_module_is_replaced_keeps_its_face_and_comes_back_as_the_identical_object(home, applied):
    original = home.free
    patches = applied(patch("free", doubled))
    assert home.free is not original
    assert home.free(1) == (2, "patched")
    assert home.free.__wrapped__ is original
    assert (home.free.__name__, home.free.__doc__) == ("free", "Adds.")
    assert str(inspect.signature(home.free)) == "(x, y=1)"
    assert patches.applied
    assert patches.undo() == ()
    assert home.free is original
    assert not patches.applied


@pytest.mark.parametrize("name", ["method", "static", "klass", "size", "once", "__init__"])
def test_every_kind_of_member_stays_of_its_kind_and_comes_back_as_the_identical_object(home, applied, name):
    original = vars(home.Derived)[name]
    patches = applied(patch(f"Derived.{name}", doubled if name != "__init__" else nothing_but_the_original))
    now = vars(home.Derived)[name]
    assert type(now) is type(original)
    assert now is not original
    thing = home.Derived(5)
    found = {
        "method": lambda: thing.method(4),
        "static": lambda: home.Derived.static(1),
        "klass": lambda: home.Derived.klass(1),
        "size": lambda: thing.size,
        "once": lambda: (thing.once, thing.once is thing.once)[0],
        "__init__": lambda: (thing.n, "patched"),
    }[name]()
    assert found[1] == "patched"
    assert found[0] == {
        "method": 8, "static": 1, "klass": ("Derived", 1), "size": 5, "once": [5], "__init__": 5
    }[name]  # fmt: skip
    if name == "size":
        thing.size = 9
        assert thing.n == 9  # the setter is still there
    assert patches.undo() == ()
    assert vars(home.Derived)[name] is original


def nothing_but_the_original(original):
    def replacement(*arguments, **named):
        return original(*arguments, **named)

    return replacement


def test_an_inherited_member_is_patched_in_the_class_that_was_named_and_removed_from_it_again(home, applied):
    original = vars(home.Base)["inherited"]
    patches = applied(patch("Derived.inherited", doubled))
    assert home.Derived().inherited() == ("base", "patched")
    assert home.Base().inherited() == "base"
    patches.undo()
    assert "inherited" not in vars(home.Derived)
    assert home.Derived.inherited is original


def test_values_and_classes_can_be_replaced_too(home, applied):
    derived = home.Derived
    other = home.make("other", "from home import Derived, LIMIT\n")
    patches = applied(
        patch("LIMIT", lambda limit: limit + 1, also=("other:LIMIT",)),
        patch("Derived.factor", lambda factor: factor * 10),
        patch("Derived", lambda base: type("Derived", (base,), {"n": 0}), also=("other:Derived",)),
    )
    assert (home.LIMIT, other.LIMIT, home.Derived().method(1)) == (8, 8, 20)
    assert other.Derived is home.Derived
    assert issubclass(home.Derived, derived)
    patches.undo()
    assert (home.LIMIT, other.LIMIT, derived.factor) == (7, 7, 2)
    assert home.Derived is other.Derived is derived


def test_names_imported_by_value_are_patched_too_and_come_back(home, applied):
    original = home.free
    one = home.make("one", "from home import free as renamed\n")
    patches = applied(patch("free", doubled, also=("one:renamed", "not_imported_yet:free")))
    assert one.renamed is home.free
    assert one.renamed(1) == (2, "patched")
    late = home.make("late", "from home import free\n")  # imported while the patch is in place
    assert late.free is home.free
    patches.undo()
    assert one.renamed is late.free is home.free is original


HOLDER = "from home import free as renamed\nfrom home import Derived\ns = Derived.static\n"


def test_whoever_holds_an_original_by_value_gets_the_replacement_and_the_original_back(home, applied):
    original, static = home.free, home.Derived.static
    one = home.make("one", HOLDER)
    patches = applied(patch("free", doubled), patch("Derived.static", doubled))
    assert one.renamed is home.free
    assert one.s is home.Derived.static
    assert (one.renamed(1), one.s(3)) == ((2, "patched"), (3, "patched"))
    assert patches.undo() == ()
    assert one.renamed is home.free is original
    assert one.s is home.Derived.static is static


def test_a_module_with_two_names_is_patched_once_and_nothing_is_said_to_be_left(home, applied, monkeypatch):
    original = home.free
    one = home.make("one", HOLDER)
    monkeypatch.setitem(sys.modules, "alias_of_one", one)
    patches = applied(patch("free", doubled))
    assert one.renamed is home.free is not original
    assert patches.undo() == ()
    assert one.renamed is home.free is original


@pytest.mark.parametrize("how", [{"leave": ("one:renamed",)}, {"alone": True}], ids=str)
def test_a_name_that_is_left_keeps_the_original_held_by_value(home, applied, how):
    original = home.free
    one = home.make("one", HOLDER)
    patches = applied(patch("free", doubled, **how))
    assert one.renamed is original
    assert home.free is not original
    patches.undo()
    assert one.renamed is home.free is original


def test_a_replacement_that_everybody_shares_comes_back_where_it_was_put(home, applied):
    original = home.free
    one = home.make("one", HOLDER)
    other = home.make("other", "unrelated = None\n")
    patches = applied(patch("free", lambda _: None))
    assert home.free is one.renamed is None
    patches.undo()
    assert home.free is one.renamed is original
    assert other.unrelated is None


def test_a_listed_place_that_holds_something_else_is_refused(home, applied):
    home.make("one", "free = 3\n")
    for also in ("one:free", "one:gone"):
        with pytest.raises(PatchError, match=r"mend `also`|was asked for"):
            applied(patch("free", doubled, also=(also,)))


def test_an_operator_of_a_namespace_is_an_attribute_like_any_other(home, applied):
    assert "compressor" not in vars(home.ops.space)
    patches = applied(patch("ops.space.compressor", doubled))
    assert home.ops.space.compressor(3) == (3, "patched")
    original = home.ops.space.compressor.__wrapped__
    patches.undo()
    assert home.ops.space.compressor is original


def test_an_operator_of_torch_is_known_to_contracts_by_its_own_name():
    one = Patch("torch:ops._C_ascend.compressor", doubled, "why", "when")
    assert one.recorded_as == "_C_ascend::compressor"
    assert patch("free", doubled).recorded_as == "home:free"


def test_applying_twice_is_applying_once(home, applied):
    patches = applied(patch("free", doubled))
    once = home.free
    patches.apply(verdict("free"))
    assert home.free is once
    patches.undo()
    assert patches.undo() == ()
    patches.apply(verdict("free"))
    assert home.free(1) == (2, "patched")


def test_a_replacement_that_loads_the_plugin_again_does_not_apply_it_twice(home, applied):
    calls = []

    def again(original):
        calls.append(patches.applied)
        patches.apply(verdict("free"))
        return doubled(original)

    patches = PatchSet("again", [patch("free", again)])
    patches.apply(verdict("free"))
    assert calls == [True]
    assert home.free(1) == (2, "patched")
    patches.undo()


def test_another_set_of_the_same_name_is_refused_while_the_first_is_applied(home, applied):
    first = applied(patch("free", doubled))
    with pytest.raises(PatchError, match="undo it first"):
        applied(patch("Derived.method", doubled))
    first.undo()
    applied(patch("Derived.method", doubled))


def test_a_target_that_somebody_else_has_wrapped_meanwhile_is_reported_and_left(home, applied):
    method = home.Derived.method
    patches = applied(patch("free", doubled), patch("Derived.method", doubled))
    ours = home.free

    @functools.wraps(ours)
    def theirs(*arguments):
        return ours(*arguments)

    home.free = theirs
    (left,) = patches.undo()
    assert isinstance(left, Left)
    assert left.target == "home:free"
    assert "home:free is left" in str(left)
    assert home.free is theirs
    assert home.Derived.method is method
    assert not patches.applied


def test_a_target_that_somebody_has_deleted_meanwhile_is_reported_and_left(home, applied):
    patches = applied(patch("free", doubled))
    del home.free
    (left,) = patches.undo()
    assert left.found == "nothing"
    assert not hasattr(home, "free")


def test_nothing_is_applied_where_one_patch_of_the_set_cannot_be(home, applied):
    original = home.free

    def breaks(original):
        raise RuntimeError("planted")

    for bad in (
        patch("gone", doubled),
        patch("Derived.gone", doubled),
        patch("gone.free", doubled),
        patch("Derived.method", breaks),
        patch("Derived.method", lambda original: original),
    ):
        with pytest.raises((PatchError, RuntimeError)):
            applied(patch("free", doubled), bad)
        assert home.free is original
    with pytest.raises(PatchError, match="no_such_module"):
        applied(Patch("no_such_module:x", doubled, "why", "when"))


class Stubborn(type):
    """A class that takes no new attributes."""

    def __setattr__(cls, name, value):
        raise TypeError("planted")


def test_what_was_put_in_place_is_taken_back_where_a_later_place_takes_nothing(home, applied):
    original = home.free
    home.Stubborn = Stubborn("Stubborn", (), {"method": lambda self: 1})
    with pytest.raises(TypeError, match="planted"):
        applied(patch("free", doubled), patch("Stubborn.method", doubled))
    assert home.free is original
    applied(patch("free", doubled))  # and the set's name is free again


def planted(target):
    change = Change(DriftKind.BODY, "a", "b")
    return Drift(f"home:{target}", change.kind, change.recorded, change.found, "the test", "it is wrong")


def test_nothing_is_patched_where_the_contract_does_not_hold(home):
    original = home.free
    patches = PatchSet("drifted", [patch("free", doubled)])
    drifted = verdict("free", drift=[planted("Derived.method"), planted("Base"), planted("Base")])
    with pytest.raises(DriftError, match=r"made-up has drifted in home:Derived.method, home:Base$") as caught:
        patches.apply(drifted)
    assert caught.value.drift == drifted.drift
    with pytest.raises(DriftError, match="no contract for this stack"):
        patches.apply(Verdict(False, (), None))
    unread = Verdict(True, (), "made-up", frozenset({"home:free"}), (("ns::op", "not readable statically"),))
    with pytest.raises(DriftError, match=r"ns::op: not checked: not readable statically"):
        patches.apply(unread)
    with pytest.raises(DriftError, match=r"not recorded.*home:free"):
        patches.apply(verdict("Base"))
    assert home.free is original
    assert not patches.applied


def test_a_patch_says_its_reason_and_its_removal_and_one_target_has_one_patch():
    for wrong in ({"reason": ""}, {"removal": ""}, {"target": "no colon"}, {"also": ("no colon",)}):
        with pytest.raises(ValueError, match=r"module:name|reason"):
            Patch(**{"target": "a:b", "make": doubled, "reason": "why", "removal": "when", **wrong})
    with pytest.raises(ValueError, match="two patches of home:free"):
        PatchSet("twice", [patch("free", doubled), patch("free", doubled)])


def test_a_forked_child_has_the_patches_and_undoes_its_own(home, applied):
    original = home.free
    patches = applied(patch("free", doubled))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no test may go on in here
        try:
            seen = [patches.applied, home.free(1) == (2, "patched")]
            patches.apply(verdict("free"))
            seen.append(home.free.__wrapped__ is original)
            patches.undo()
            seen.append(home.free is original)
            os.write(write, repr(seen).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 1000) == b"[True, True, True, True]"
    os.close(read)
    assert patches.applied  # the parent's are its own
    assert home.free(1) == (2, "patched")


SPAWNED = """
import json, multiprocessing, sys
from afd_dsv4.compat.contract import Verdict
from afd_dsv4.compat.patch import Patch, PatchSet

def make(original):
    return lambda: "patched " + original()

PATCHES = PatchSet("spawned", [Patch("platform:machine", make, "why", "when")])
VERDICT = Verdict(True, (), "made-up", frozenset({"platform:machine"}))

def child(queue):
    import platform
    before = platform.machine
    seen = [PATCHES.applied, platform.machine().startswith("patched")]
    PATCHES.apply(VERDICT)
    seen += [PATCHES.applied, platform.machine().startswith("patched ")]
    PATCHES.undo()
    queue.put([*seen, platform.machine is before])

if __name__ == "__main__":
    PATCHES.apply(VERDICT)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(json.dumps(queue.get(timeout=100)))
    process.join()
"""


def test_a_spawned_child_begins_without_and_applies_for_itself(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "[false, false, true, true, true]", done.stderr
