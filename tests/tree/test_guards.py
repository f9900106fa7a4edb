"""The checks of the tree fail when they should: small trees with one fault each."""
import os
import tempfile
import unittest

import checks
import guards
import layout
import sources
import tokens


class OfFiles(unittest.TestCase):
    """Each test lays out a tree of its own."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        root, sources.ROOT = sources.ROOT, self.folder.name
        self.addCleanup(setattr, sources, "ROOT", root)
        self.forget()
        self.addCleanup(self.forget)

    def forget(self):
        checks.tree.cache_clear()
        checks.code.cache_clear()

    def found(self, check, **texts):
        """Keys that `check` reports for files given as core__base__a_hpp="text"."""
        for name, text in texts.items():
            path = os.path.join(self.folder.name, name.replace("__", "/"))
            path = ".".join(path.rsplit("_", 1))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
        self.forget()
        return {finding.key: finding.size for finding in check()}

    def test_includes_between_rooms(self):
        header = dict(app__plan__x_hpp="", parallel__context__x_hpp="", parallel__comm__x_hpp="")
        found = self.found(
            checks.includes,
            io__data__a_cpp='#include "parallel/comm/x.hpp"\n#include "parallel/context/x.hpp"\n',
            parallel__comm__a_cpp='// #include "app/plan/x.hpp"\n#  include "app/plan/x.hpp"\n',
            **header,
        )
        self.assertEqual(
            sorted(found),
            [
                "io/data/a.cpp>parallel/context/x.hpp",
                "parallel/comm/a.cpp>app/plan/x.hpp",
            ],
        )

    def test_includes_inside_a_room(self):
        found = self.found(
            checks.includes,
            core__base__a_hpp='#include "core/model/b.hpp"\n',
            core__model__b_hpp='#include "core/base/a.hpp"\n#include "core/observe/c.hpp"\n',
            core__observe__c_hpp="#include <string>\n",
            core__config__d_hpp="",
            kernels__model__e_hpp='#include "core/config/d.hpp"\n',
        )
        self.assertEqual(
            sorted(found),
            [
                "core/base/a.hpp>core/model/b.hpp",
                "core/model/b.hpp>core/observe/c.hpp",
                "kernels/model/e.hpp>core/config/d.hpp",
            ],
        )

    def test_a_folder_without_a_level(self):
        self.assertEqual(self.found(checks.includes, core__other__a_hpp=""), {"core/other": 1})

    def test_device_headers(self):
        found = self.found(
            checks.device_headers,
            core__base__error_hpp="#include <fmt/format.h>\n",
            core__base__tensor_hpp='#include "core/base/error.hpp"\n',
            core__base__ids_hpp='// #include "core/base/error.hpp"\n#include <string>\n',
            kernels__cuda__a_cu='#include "core/base/tensor.hpp"\n',
            kernels__cuda__b_cuh="#  include <fmt/core.h>\n",
            kernels__cuda__c_cu='#include "core/base/ids.hpp"\n',
            kernels__cuda__d_cpp='#include "core/base/error.hpp"\n',
        )
        self.assertEqual(sorted(found), ["kernels/cuda/a.cu", "kernels/cuda/b.cuh"])

    def test_libraries(self):
        found = self.found(
            checks.libraries,
            core__base__a_cpp='// MPI_Send\nconst char* said = "cudaMalloc";\n',
            core__base__b_cpp="int r = MPI_Send();\nint s = H5Dopen2(f);\n",
            kernels__ops__c_cpp="cudaStream_t s; ncclComm_t c;\n",
            parallel__comm__d_cpp="MPI_Send();\n",
        )
        expected = ["b.cpp:HDF5", "b.cpp:MPI", "c.cpp:CUDA", "c.cpp:NCCL"]
        self.assertEqual([os.path.basename(key) for key in sorted(found)], expected)

    def test_deck_keys(self):
        read = 'deck.text("run.seed");\nd->get<std::string>(\n"data.path");\nx.set("run.seed");\n'
        found = self.found(
            checks.deck_keys, app__plan__a_cpp=read, io__deck__b_cpp=read, core__config__c_cpp=read
        )
        self.assertEqual(found, {"app/plan/a.cpp": 2})

    def test_choices(self):
        table = 'struct EnumNames<Kind> { table{{{Kind::a, "first"}, {Kind::b, "second"}}}; };\n'
        found = self.found(
            checks.choices,
            core__base__kinds_hpp=table,
            app__plan__a_cpp='if (x == "first" || y != "second" || z == "third") ;\n',
            app__plan__b_cpp='if (x == Kind::a && z == "third") print("first");\n',
        )
        self.assertEqual(found, {"app/plan/a.cpp": 2})

    def test_sizes_and_columns(self):
        long = "\n" * layout.MOST_LINES_OF_A_FILE
        self.assertEqual(self.found(checks.file_lines, core__base__a_hpp=long), {})
        found = self.found(checks.file_lines, core__base__a_hpp=long + "\n")
        self.assertEqual(found, {"core/base/a.hpp": layout.MOST_LINES_OF_A_FILE + 1})
        wide = "x" * layout.MOST_COLUMNS
        found = self.found(checks.columns, jobs__a_sh=f"{wide}\n{wide}x\n")
        self.assertEqual(found, {"jobs/a.sh": 1})

    def test_headers_folders_words_and_mirror(self):
        files = dict(
            core__base__a_cpp="", core__base__a_hpp="", core__base__b_cpp="// formed " + "again\n"
        )
        files |= dict(core__base__a_twice_cpp="", app__command__c_cpp="")
        files["app__command__command_line_hpp"] = ""
        files["tests__core__base__test_a_cpp"] = ""
        files["tests__core__base__test_a_twice_cpp"] = ""
        files["tests__core__base__test_other_cpp"] = ""
        self.assertEqual(list(self.found(checks.headers, **files)), ["core/base/b.cpp"])
        self.assertIn("core/base", self.found(checks.folders))
        self.assertNotIn("core/base", self.found(checks.folders, core__base__README_md="base"))
        self.assertEqual(list(self.found(checks.words).values()), [1])
        self.assertEqual(list(self.found(checks.mirror)), ["tests/core/base/test_other.cpp"])

    def test_long_functions(self):
        body = "  x();\n" * layout.MOST_LINES_OF_A_FUNCTION
        found = self.found(
            checks.functions,
            core__base__a_cpp="void short_one() {}\nvoid long_one() {\n" + body + "}\n",
            kernels__ops__b_cu="__global__ void kernel() {\n" + body + "}\n",
            app__report__c_py="def long_one():\n" + body + "\n",
        )
        lines = layout.MOST_LINES_OF_A_FUNCTION
        expected = {"app/report/c.py:long_one": lines + 1, "core/base/a.cpp:long_one": lines + 2}
        self.assertEqual(found, expected)


class OfTexts(unittest.TestCase):
    def names(self, text):
        return [(name, lines) for name, _, lines, _ in sources.cpp_functions(text)]

    def test_scopes_and_initialisers_are_no_functions(self):
        text = """
namespace a {
enum class E { one, two };
constexpr int table[] = {1, 2};
const std::vector<int> made = make({1, 2});
template <class T, int n = f(3)>
struct alignas(16) S : Base<T> {
  int x{0};
  S() : x{1}, y_(2) {
  }
  bool operator==(const S& other) const { return x == other.x; }
 private:
  static constexpr double half() noexcept { return 0.5; }
};
}  // namespace a
"""
        expected = [("S", 2), ("operator==", 1), ("half", 1)]
        self.assertEqual(self.names(text), expected)

    def test_heads_of_functions(self):
        text = """
std::vector<int> A<T>::list(const B& b = {},
                            int n) const {
  const auto inner = [&](int i) { return i; };
  return {inner(n)};
}
__global__ void __launch_bounds__(256) kernel(int n) {
}
const auto square = [](int x) {
  return x * x;
};
auto f() -> std::pair<int, int> { return {1, 2}; }
"""
        expected = [("A<T>::list", 5), ("kernel", 2), ("square", 3), ("f", 1)]
        self.assertEqual(self.names(text), expected)

    def test_braces_in_strings_comments_and_branches_not_taken(self):
        text = """
int f() {  // {
  const char* s = "{ \\" {"; /* { */ char c = '{';
#ifdef A
  if (x) {
#else
  if (y) {
#endif
  }
  return R"({)"[0];
}
int g() { return 1'000; }
"""
        self.assertEqual(self.names(text), [("f", 10), ("g", 1)])


class OfTokens(unittest.TestCase):
    def test_comments_and_blanks_are_none(self):
        text = 'int  f(/* a */)\n{ return a->b[1\'000] <= "a // b"[0]; }  // c\n'
        self.assertEqual(tokens.of_cpp(text), 19)
        self.assertEqual(tokens.of_cpp("x = 1e-3f + .5;"), 6)

    def test_docstrings_are_comments(self):
        plain = "def f(x):\n    return x + 'a'\n"
        text = '"""Module."""\ndef f(x):\n    """Says."""\n    # why\n\n    return x + \'a\'\n'
        self.assertEqual(tokens.of_python(plain), 10)
        self.assertEqual(tokens.of_python(text), 10)


class OfExceptions(unittest.TestCase):
    def judge(self, size, allowed):
        findings = {"place": checks.Finding("place", size, "text")} if size else {}
        return guards.judge(findings, {"place": allowed} if allowed else {})

    def test_an_exception_bounds_and_must_be_needed(self):
        self.assertEqual(self.judge(3, 3), [])
        self.assertEqual(self.judge(2, 3), [])
        self.assertEqual(self.judge(3, None), ["text"])
        self.assertIn("allows 3", self.judge(4, 3)[0])
        self.assertIn("no longer needed", self.judge(None, 3)[0])


if __name__ == "__main__":
    unittest.main()
