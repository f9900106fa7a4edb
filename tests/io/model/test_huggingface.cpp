// Safetensors and Hugging Face folders: exact round trips, any range, damaged files refused by
// name.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "core/base/bf16.hpp"
#include "core/base/error.hpp"
#include "io/data/token_table.hpp"
#include "io/model/huggingface.hpp"
#include "io/model/safetensors.hpp"
#include "tests/io/model/small_shape.hpp"

namespace ballast {
namespace {
namespace fs = std::filesystem;

class HuggingFace : public ::testing::Test {
 protected:
  void SetUp() override {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    dir = (fs::temp_directory_path() /
           ("ballast-hf-" + std::to_string(getpid()) + "-" + std::to_string(rank)))
              .string();
    fs::remove_all(dir);
    fs::create_directories(dir);
  }
  void TearDown() override { fs::remove_all(dir); }

  /// A value that bf16 holds exactly, the same wherever it is computed.
  static float value(std::size_t parameter, std::int64_t i) {
    return static_cast<float>((static_cast<std::int64_t>(parameter) * 31 + i * 7) % 255 - 127) / 64;
  }
  void write(const std::string& to, const std::string& dtype, std::int64_t shard_bytes) {
    write_huggingface(to, small_shape(), parameter_table(small_shape()), dtype, shard_bytes,
                      [](std::size_t p, std::int64_t begin, std::span<float> out) {
                        for (std::size_t i = 0; i < out.size(); ++i)
                          out[i] = value(p, begin + static_cast<std::int64_t>(i));
                      });
  }
  static std::string text_of(const std::string& file) {
    std::ifstream stream(file);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  /// A file's text without the line of a key.
  static std::string without(const std::string& file, const std::string& key) {
    std::string text = text_of(file);
    const std::size_t at = text.find("  \"" + key + "\"");
    return text.erase(at, text.find('\n', at) + 1 - at);
  }
  std::string dir;
};

TEST_F(HuggingFace, RoundTripIsExactInOneFileAndInSeveral) {
  const auto table = parameter_table(small_shape());
  std::vector<float> expected;
  for (std::size_t p = 0; p < table.size(); ++p)
    for (std::int64_t i = 0; i < table[p].numel(); ++i) expected.push_back(value(p, i));
  for (const char* dtype : {"BF16", "F32"})
    for (std::int64_t shard : {std::int64_t{1} << 30, std::int64_t{1500}}) {
      const std::string to = dir + "/" + dtype + std::to_string(shard);
      write(to, dtype, shard);
      EXPECT_EQ(fs::exists(to + "/model.safetensors.index.json"), shard == 1500);
      const ModelShape shape = read_huggingface_config(to);
      EXPECT_EQ(shape.parameters(), small_shape().parameters());
      EXPECT_TRUE(shape.qkv_bias);
      // Any range, as a shard of any mesh would ask for it.
      const auto n = static_cast<std::int64_t>(expected.size());
      for (const auto& [begin, end] :
           {std::pair<std::int64_t, std::int64_t>{0, n}, {n / 3 + 1, n - 7}, {5, 5}, {n - 1, n}}) {
        Tensor out = Tensor::empty({end - begin}, DType::f64);
        read_huggingface_weights(to, parameter_table(shape), begin, end, out);
        for (std::int64_t i = begin; i < end; ++i)
          ASSERT_EQ(out.data<double>()[i - begin], static_cast<double>(expected[i]))
              << dtype << " element " << i;
      }
      EXPECT_THROW(write(to, dtype, shard), Error)
          << "a folder that holds a model must not be overwritten";
    }
}

TEST_F(HuggingFace, AFileHasItsNameOnlyWhenItIsWhole) {
  const std::string path = dir + "/model.safetensors";
  const std::vector<float> values(4, 1.0f);
  {
    SafetensorsWriter writer(path, {{"a", {2, 3}}}, "F32");
    writer.append(values);
    EXPECT_THROW(writer.finish(), Error) << "two values are missing";
  }
  EXPECT_TRUE(fs::is_empty(dir));
  SafetensorsWriter writer(path, {{"a", {2, 2}}}, "F32");
  writer.append(values);
  EXPECT_FALSE(fs::exists(path));
  writer.finish();
  EXPECT_TRUE(fs::exists(path));
  EXPECT_FALSE(fs::exists(path + ".partial"));
}

TEST_F(HuggingFace, OnlySafetensorsFilesAreReplaced) {
  const auto problem = [&](const std::string& name) {
    try {
      check_safetensors_target(dir + "/" + name);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto put = [&](const std::string& name, std::uint64_t length, const std::string& rest) {
    std::ofstream file(dir + "/" + name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << rest;
  };
  EXPECT_EQ(problem("absent"), "");
  EXPECT_TRUE(fs::is_empty(dir)) << "nothing of the attempt stays";
  {
    SafetensorsWriter writer(dir + "/sound", {{"a", {1}}}, "F32");
    writer.append(std::vector<float>{1});
    writer.finish();
  }
  EXPECT_EQ(problem("sound"), "");
  put("truncated", 40, "{\"a\"");
  put("vast", std::uint64_t{1} << 40, "{}");
  put("no_brace", 4, "[[]]");
  std::ofstream(dir + "/notes") << "what somebody wrote by hand\n";
  std::ofstream(dir + "/nothing") << "";
  for (const char* name : {"truncated", "vast", "no_brace", "notes", "nothing"})
    EXPECT_NE(problem(name).find(std::string(name) + " is no safetensors file"), std::string::npos)
        << name << ": " << problem(name);
  fs::create_directory(dir + "/folder");
  ASSERT_EQ(mkfifo((dir + "/fifo").c_str(), 0600), 0);
  ASSERT_EQ(mkfifo((dir + "/half.partial").c_str(), 0600), 0);
  fs::create_symlink("/dev/null", dir + "/device");
  for (const char* name : {"folder", "fifo", "half", "device"})
    EXPECT_NE(problem(name).find("is no regular file"), std::string::npos)
        << name << ": " << problem(name);
  EXPECT_NE(problem("no/such/folder").find("cannot be written"), std::string::npos);
  // What a killed run left is written anew, and stays until then.
  std::ofstream(dir + "/sound.partial") << "left";
  EXPECT_EQ(problem("sound"), "");
  EXPECT_EQ(fs::file_size(dir + "/sound.partial"), 4u);
}

TEST_F(HuggingFace, Bf16RoundsToNearestEven) {
  EXPECT_EQ(from_bf16_bits(to_bf16_bits(1.0f + 1.0f / 256)), 1.0f);  // tie to even
  EXPECT_EQ(from_bf16_bits(to_bf16_bits(1.0f + 3.0f / 256)),
            1.0f + 2.0f / 128);  // tie to even, upwards
  EXPECT_EQ(from_bf16_bits(to_bf16_bits(-2.5f)), -2.5f);
  EXPECT_TRUE(std::isnan(from_bf16_bits(to_bf16_bits(NAN))));
  EXPECT_TRUE(std::isinf(from_bf16_bits(to_bf16_bits(INFINITY))));
}

TEST_F(HuggingFace, HalfPrecisionIsRead) {
  const std::string header = R"({"x":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}})";
  const std::uint64_t length = header.size();
  const std::uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7bff};
  std::ofstream file(dir + "/model.safetensors", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8);
  file << header;
  file.write(reinterpret_cast<const char*>(halves), 8);
  file.close();
  std::vector<double> out(4);
  Safetensors(dir).read("x", 0, std::span<double>(out));
  EXPECT_EQ(out, (std::vector<double>{1.0, -2.0, std::ldexp(1.0, -24), 65504.0}));
}

TEST_F(HuggingFace, PointersOfGitLfsAreNamedAsSuch) {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
  const auto expect = [&](const std::string& name, const auto& read) {
    try {
      read();
      ADD_FAILURE() << name << ": a pointer was read";
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()), fmt::format("{}/{}: is a Git LFS pointer, not the file "
                                                   "itself; `git lfs pull` there fetches it",
                                                   dir, name));
    }
  };
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    std::ofstream(dir + "/" + name) << pointer;
    expect(name, [&] { Safetensors(std::string(dir)); });
  }
  std::ofstream(dir + "/config.json") << pointer;
  expect("config.json", [&] { read_huggingface_config(dir); });
  std::ofstream(dir + "/tokenizer.json") << pointer;
  expect("tokenizer.json", [&] { token_table_crc32(dir); });
}

TEST_F(HuggingFace, ConfigsThatAreNoObjectSayWhatTheyHold) {
  for (const auto& [text, word] : {std::pair{"[]", "a list"},
                                   {"3", "a number"},
                                   {"\"x\"", "a string"},
                                   {"[{", "valid JSON"}}) {
    std::ofstream(dir + "/config.json") << text;
    try {
      read_huggingface_config(dir);
      ADD_FAILURE() << text << " was read";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << text << ": " << e.what();
      EXPECT_NE(std::string(e.what()).find("config.json"), std::string::npos) << e.what();
    }
  }
}

TEST_F(HuggingFace, ModelsKeepTheirTypes) {
  ModelShape shape = small_shape();
  const auto type_of = [&](const char* name) {
    const std::string to = dir + "/" + name;
    write_huggingface(to, shape, parameter_table(shape), "F32", std::int64_t{1} << 30,
                      [](std::size_t, std::int64_t, std::span<float> out) {
                        std::fill(out.begin(), out.end(), 1.0f);
                      });
    const ModelShape read = read_huggingface_config(to);
    EXPECT_EQ(read.qk_norm, shape.qk_norm) << name;
    EXPECT_EQ(read.qkv_bias, shape.qkv_bias) << name;
    EXPECT_EQ(read.parameters(), shape.parameters()) << name;
    return read.preset.substr(0, read.preset.find(' '));
  };
  EXPECT_EQ(type_of("a"), "qwen2");
  shape.qkv_bias = false;
  EXPECT_EQ(type_of("b"), "llama");
  shape.qk_norm = true;
  EXPECT_EQ(type_of("c"), "qwen3");
}

TEST_F(HuggingFace, MistralWithoutAWindowIsRead) {
  write(dir + "/m", "F32", std::int64_t{1} << 30);
  std::string text = text_of(dir + "/m/config.json");
  const std::size_t at = text.find("\"qwen2\"");
  text.replace(at, 7, "\"mistral\"");
  const auto read = [&](const std::string& more) -> std::string {
    std::ofstream(dir + "/m/config.json") << "{" << more << text.substr(1);
    try {
      const ModelShape shape = read_huggingface_config(dir + "/m");
      return shape.qkv_bias || shape.qk_norm ? "another model" : "";
    } catch (const Error& e) {
      return e.what();
    }
  };
  EXPECT_EQ(read("\"sliding_window\": null,"), "");
  for (const char* more : {"", "\"sliding_window\": 4096,"})  // Transformers' default is 4096
    EXPECT_NE(read(more).find("sliding-window attention"), std::string::npos) << more;
}

TEST_F(HuggingFace, TwoStatementsOfRopeMustAgree) {
  write(dir + "/m", "F32", std::int64_t{1} << 30);
  const std::string file = dir + "/m/config.json";
  std::string text = without(file, "rope_theta");
  const auto read = [&](const std::string& parameters, const std::string& scaling) -> std::string {
    std::ofstream(file) << "{\"rope_parameters\": " << parameters
                        << ", \"rope_scaling\": " << scaling << "," << text.substr(1);
    try {
      const ModelShape shape = read_huggingface_config(dir + "/m");
      return fmt::format("{} {}", shape.rope_theta, shape.yarn_factor);
    } catch (const Error& e) {
      return e.what();
    }
  };
  const std::string plain = R"({"rope_type": "default", "rope_theta": 5000.0})",
                    yarn = R"({"type": "yarn", "factor": 4.0})",
                    both = R"({"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0})";
  EXPECT_EQ(read(plain, "null"), "5000 1");
  EXPECT_EQ(read(plain, "{}"), "5000 1");
  EXPECT_EQ(read(plain, R"({"type": "default"})"), "5000 1");
  EXPECT_EQ(read("{}", yarn), "10000 4");
  EXPECT_EQ(read(both, yarn), "5000 4");
  for (const std::string& other :
       {yarn, std::string(R"({"type": "default", "rope_theta": 6000.0})")}) {
    const std::string error = read(plain, other);
    for (const char* word : {"config.json", "\"rope_parameters\"", "\"rope_scaling\"", "differ"})
      EXPECT_NE(error.find(word), std::string::npos) << error;
  }
  const std::string nested = read(R"({"full_attention": {"rope_theta": 5000.0}})", "null");
  EXPECT_NE(nested.find("full_attention layers"), std::string::npos) << nested;
  text.insert(1, "\"rope_theta\": 4000.0,");
  const std::string bases = read(plain, "null");
  for (const char* word : {"\"rope_theta\" = 4000", "\"rope_parameters\", 5000"})
    EXPECT_NE(bases.find(word), std::string::npos) << bases;
}

TEST_F(HuggingFace, TheModelsOwnLengthGoesBeforeItsRopes) {
  write(dir + "/m", "F32", std::int64_t{1} << 30);
  const std::string file = dir + "/m/config.json";
  const std::string text = without(file, "max_position_embeddings");
  const auto read = [&](const std::string& more, const std::string& in_rope) -> std::string {
    std::ofstream(file) << "{" << more << R"("rope_scaling": {"type": "yarn", "factor": 4.0)"
                        << in_rope << "}," << text.substr(1);
    try {
      return std::to_string(read_huggingface_config(dir + "/m").original_context);
    } catch (const Error& e) {
      return e.what();
    }
  };
  const std::string own = R"("original_max_position_embeddings": 32,)",
                    at_most = R"("max_position_embeddings": 64,)",
                    in_rope = R"(, "original_max_position_embeddings": 16)";
  EXPECT_EQ(read(own + at_most, in_rope), "32");
  EXPECT_EQ(read(own, ""), "32");
  EXPECT_EQ(read(at_most, in_rope), "16");
  EXPECT_EQ(read(at_most, ""), "64");
  EXPECT_NE(read("", "").find("for which length"), std::string::npos) << read("", "");
  EXPECT_NE(read(R"("original_max_position_embeddings": 32.5,)", "").find("whole number"),
            std::string::npos);
}

TEST_F(HuggingFace, AnExportHasTheTokenIdsOfItsBase) {
  write(dir + "/base", "F32", std::int64_t{1} << 30);
  const std::string file = dir + "/base/config.json",
                    rest = without(file, "bos_token_id").substr(1);
  int exports = 0;
  const auto kept = [&](const std::string& ids) {
    std::ofstream(file) << "{" << ids << rest;
    const std::string to = dir + "/" + std::to_string(exports++);
    write_huggingface(
        to, small_shape(), parameter_table(small_shape()), "F32", std::int64_t{1} << 30,
        [](std::size_t, std::int64_t, std::span<float> out) { std::ranges::fill(out, 1.0f); },
        dir + "/base");
    const std::string text = text_of(to + "/config.json"), key = "\"bos_token_id\": ";
    const std::size_t at = text.find(key);
    return at == std::string::npos ? "" : text.substr(at + key.size(), 4);
  };
  EXPECT_EQ(kept("\"bos_token_id\": null,"), "null");
  EXPECT_EQ(kept("\"bos_token_id\": 1234,"), "1234");
  EXPECT_EQ(kept(""), "");  // that of the class
}

TEST_F(HuggingFace, WhatIsCarriedOverComesBeforeTheWeights) {
  write(dir + "/base", "F32", std::int64_t{1} << 30);
  const std::string templates = "/additional_chat_templates/one.jinja";
  for (const char* folder : {"/base", "/to"})
    fs::create_directories(dir + folder + "/additional_chat_templates");
  std::ofstream(dir + "/base" + templates) << "new";
  std::ofstream(dir + "/to" + templates) << "old";
  int reads = 0;
  const auto convert = [&](const std::string& to) {
    write_huggingface(
        dir + to, small_shape(), parameter_table(small_shape()), "F32", std::int64_t{1} << 30,
        [&](std::size_t, std::int64_t, std::span<float> out) {
          ++reads;
          std::ranges::fill(out, 1.0f);
        },
        dir + "/base");
  };
  convert("/to");
  EXPECT_EQ(text_of(dir + "/to" + templates), "new");
  EXPECT_GT(reads, 0);
  reads = 0;
  fs::create_directories(dir + "/bad/tokenizer.json");  // in the way
  std::ofstream(dir + "/base/tokenizer.json") << "{}";
  EXPECT_THROW(convert("/bad"), Error);
  EXPECT_EQ(reads, 0);
}

TEST_F(HuggingFace, ATiedHeadOfOtherValuesIsAnotherModel) {
  const std::vector<Parameter> table = parameter_table(small_shape());  // not tied
  const auto written = [&](const std::string& to, float more) {
    write_huggingface(dir + to, small_shape(), table, "F32", std::int64_t{1} << 30,
                      [&](std::size_t p, std::int64_t begin, std::span<float> out) {
                        const bool head = table[p].name == "lm_head.weight";
                        for (std::size_t i = 0; i < out.size(); ++i)
                          out[i] = value(head ? 0 : p, begin + static_cast<std::int64_t>(i));
                        if (head && begin == 0) out[5] += more;
                      });
    std::string text = text_of(dir + to + "/config.json");
    const std::string untied = "\"tie_word_embeddings\": false";
    text.replace(text.find(untied), untied.size(), "\"tie_word_embeddings\": true");
    std::ofstream(dir + to + "/config.json") << text;
    const std::vector<Parameter> tied = parameter_table(read_huggingface_config(dir + to));
    std::int64_t n = 0;
    for (const Parameter& parameter : tied) n += parameter.numel();
    Tensor out = Tensor::empty({n}, DType::f32);
    try {
      read_huggingface_weights(dir + to, tied, 0, n, out);
      return std::string();
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  ASSERT_EQ(table[0].name, "model.embed_tokens.weight");
  EXPECT_EQ(written("/same", 0), "");
  EXPECT_NE(written("/other", 1).find("lm_head.weight differs"), std::string::npos);
}

TEST_F(HuggingFace, PicklesAreNamedWhereNothingElseIsThere) {
  std::ofstream(dir + "/pytorch_model.bin") << "x";
  try {
    Safetensors source(dir);
    FAIL() << "read";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("pytorch_model.bin"), std::string::npos) << e.what();
  }
}

TEST_F(HuggingFace, DamagedFilesAreRefusedByName) {
  write(dir + "/m", "BF16", std::int64_t{1} << 30);
  const std::string path = dir + "/m/model.safetensors";
  std::string good;
  {
    std::ifstream file(path, std::ios::binary);
    good.assign(std::istreambuf_iterator<char>(file), {});
  }
  const auto size_of_header = [&] {
    std::uint64_t n = 0;
    std::memcpy(&n, good.data(), 8);
    return n;
  }();
  std::mt19937 rng(99);
  int refused = 0;
  for (int trial = 0; trial < 60; ++trial) {
    std::string bad = good;
    if (trial % 3 == 0) bad.resize(rng() % good.size());
    if (trial % 3 == 1) bad[rng() % 8] = static_cast<char>(0x40 + rng() % 60);  // header length
    if (trial % 3 == 2) bad[8 + rng() % size_of_header] = static_cast<char>(rng());  // header text
    std::ofstream(path, std::ios::binary) << bad;
    try {
      Tensor out = Tensor::empty({small_shape().parameters()}, DType::f32);
      read_huggingface_weights(dir + "/m", parameter_table(small_shape()), 0,
                               small_shape().parameters(), out);
    } catch (const Error& e) {
      ++refused;
      EXPECT_NE(std::string(e.what()).find("/m"), std::string::npos) << e.what();
    }
  }
  EXPECT_GE(refused,
            40);  // all truncations and lengths; a changed header character may be harmless padding
  std::ofstream(dir + "/m/config.json") << R"({"model_type": "mamba"})";
  EXPECT_THROW(read_huggingface_config(dir + "/m"), Error);
  EXPECT_THROW(read_huggingface_config(dir + "/nowhere"), Error);
}

/// Writes a safetensors file of a header and `bytes` data bytes.
void write_raw(const std::string& path, const std::string& header, std::size_t bytes) {
  const std::uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8);
  file << header << std::string(bytes, '\1');
}

/// The error of opening `path`, or "" when it opens.
std::string refusal(const std::string& path) {
  try {
    const Safetensors opened(path);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST_F(HuggingFace, TensorsCoverTheDataOnce) {
  const std::string path = dir + "/x.safetensors";
  const auto entry = [](const char* name, const std::string& offsets) {
    return fmt::format(R"("{}":{{"dtype":"F32","shape":[2],"data_offsets":{}}})", name, offsets);
  };
  const auto refused = [&](const std::string& a, const std::string& b, std::size_t bytes) {
    write_raw(path, "{" + a + "," + b + "}", bytes);
    return refusal(path);
  };
  EXPECT_EQ(refused(entry("a", "[0,8]"), entry("b", "[8,16]"), 16), "");
  EXPECT_EQ(refused(entry("a", "[8,16]"), entry("b", "[0,8]"), 16), "");
  EXPECT_NE(refused(entry("a", "[0,8]"), entry("b", "[4,12]"), 16).find("two tensors"),
            std::string::npos);
  EXPECT_NE(refused(entry("a", "[0,8]"), entry("b", "[0,8]"), 8).find("two tensors"),
            std::string::npos);
  EXPECT_NE(refused(entry("a", "[0,8]"), entry("b", "[12,20]"), 20).find("no tensor"),
            std::string::npos);
  EXPECT_NE(refused(entry("a", "[0,8]"), entry("b", "[8,16]"), 17).find("follow the last"),
            std::string::npos);
  EXPECT_NE(refused(entry("a", "[0,8]"), entry("a", "[8,16]"), 16).find("occurs twice"),
            std::string::npos);
  EXPECT_NE(refused(entry("a", "[0.5,8.5]"), entry("b", "[8,16]"), 16).find("whole number"),
            std::string::npos);
}

TEST_F(HuggingFace, AnIndexNamesFilesOfItsFolder) {
  const std::string entry = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string other = R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  fs::create_directories(dir + "/m");
  fs::create_directories(dir + "/elsewhere");
  write_raw(dir + "/m/1.safetensors", entry, 8);
  write_raw(dir + "/m/2.safetensors", other, 8);
  write_raw(dir + "/elsewhere/3.safetensors", entry, 8);
  const auto with = [&](const std::string& map) {
    std::ofstream(dir + "/m/model.safetensors.index.json") << "{\"weight_map\":" + map + "}";
    return refusal(dir + "/m");
  };
  EXPECT_EQ(with(R"({"a":"1.safetensors","b":"2.safetensors"})"), "");
  EXPECT_NE(with(R"({"a":"2.safetensors","b":"1.safetensors"})").find("is not in"),
            std::string::npos);
  EXPECT_NE(with(R"({"a":"../elsewhere/3.safetensors"})").find("no file name"), std::string::npos);
  EXPECT_NE(with(R"({"a":"/etc/passwd"})").find("no file name"), std::string::npos);
  fs::create_symlink(dir + "/elsewhere/3.safetensors", dir + "/m/3.safetensors");
  EXPECT_NE(with(R"({"a":"3.safetensors"})").find("leads out"), std::string::npos);
  // A single file without an index likewise.
  fs::create_directories(dir + "/one");
  fs::create_symlink(dir + "/elsewhere/3.safetensors", dir + "/one/model.safetensors");
  EXPECT_NE(refusal(dir + "/one").find("leads out"), std::string::npos);
  // As a Hugging Face cache lays it out.
  fs::create_directories(dir + "/hub/snapshots/r");
  fs::create_directories(dir + "/hub/blobs");
  write_raw(dir + "/hub/blobs/0a", entry, 8);
  fs::create_symlink("../../blobs/0a", dir + "/hub/snapshots/r/1.safetensors");
  std::ofstream(dir + "/hub/snapshots/r/model.safetensors.index.json")
      << R"({"weight_map":{"a":"1.safetensors"}})";
  EXPECT_EQ(refusal(dir + "/hub/snapshots/r"), "");
  fs::create_directories(dir + "/hub/snapshots/s");
  fs::create_symlink("../../blobs/0a", dir + "/hub/snapshots/s/model.safetensors");
  EXPECT_EQ(refusal(dir + "/hub/snapshots/s"), "");
}

TEST_F(HuggingFace, AFifoIsAnErrorAndNoWait) {
  const std::string path = dir + "/x.safetensors";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_NE(refusal(path), "");
  fs::create_directories(dir + "/m");
  ASSERT_EQ(::mkfifo((dir + "/m/config.json").c_str(), 0600), 0);
  EXPECT_THROW(read_huggingface_config(dir + "/m"), Error);
}

TEST_F(HuggingFace, WeightsThatAreNotFiniteAreNamed) {
  write_huggingface(dir + "/m", small_shape(), parameter_table(small_shape()), "F32",
                    std::int64_t{1} << 30,
                    [](std::size_t p, std::int64_t begin, std::span<float> out) {
                      for (std::size_t i = 0; i < out.size(); ++i)
                        out[i] = p == 3 && begin + static_cast<std::int64_t>(i) == 2 ? NAN : 1.0f;
                    });
  Tensor out = Tensor::empty({small_shape().parameters()}, DType::f32);
  try {
    read_huggingface_weights(dir + "/m", parameter_table(small_shape()), 0,
                             small_shape().parameters(), out);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(parameter_table(small_shape())[3].name),
              std::string::npos);
  }
}

TEST_F(HuggingFace, SizesOfAConfigAreBoundedAsADecksAre) {
  write(dir + "/m", "BF16", std::int64_t{1} << 30);
  const std::string good = text_of(dir + "/m/config.json");
  const auto with = [&](const std::string& key, const std::string& value) {
    std::string text = good;
    const std::size_t at = text.find("\"" + key + "\":"),
                      begin = at == std::string::npos ? 1 : text.find(':', at) + 1;
    if (at == std::string::npos)
      text.insert(1, "\"" + key + "\": " + value + ",");
    else
      text.replace(begin, text.find_first_of(",\n", begin) - begin, value);
    std::ofstream(dir + "/m/config.json") << text;
    try {
      read_huggingface_config(dir + "/m");
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(with("num_hidden_layers", "2"), "");
  for (const char* value : {"2147483648", "0", "-1", "2.5", "1e300"})
    EXPECT_NE(with("num_hidden_layers", value).find("num_hidden_layers"), std::string::npos)
        << value;
  EXPECT_EQ(with("is_causal", "true"), "");
  EXPECT_NE(with("is_causal", "false").find("is_causal"), std::string::npos);
  EXPECT_EQ(with("layer_types", R"(["full_attention"])"), "");
  EXPECT_NE(with("layer_types", R"("full_attention")").find("no list"), std::string::npos);
  EXPECT_NE(with("vocab_size", "99999999999").find("vocab_size"), std::string::npos);
  for (const char* value : {"5", "[]", "null", "\"x\""})
    EXPECT_NE(with("rope_parameters", value).find("rope_parameters"), std::string::npos) << value;
}

}  // namespace
}  // namespace ballast
