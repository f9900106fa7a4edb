// What of a config.json no weight shows: defaults of a class, lengths that go with a rope, sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "io/model/huggingface.hpp"
#include "tests/io/model/small_shape.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class HuggingFaceConfig : public TemporaryFolder {
 protected:
  std::string write(const std::string& name, const ModelShape& shape, const std::string& base = "",
                    std::int64_t shard_bytes = std::int64_t{1} << 30) {
    write_huggingface(
        dir + "/" + name, shape, parameter_table(shape), "F32", shard_bytes,
        [](std::size_t, std::int64_t, std::span<float> out) { std::ranges::fill(out, 1.0f); },
        base);
    return dir + "/" + name;
  }
  static json read(const std::string& file) { return json::parse(std::ifstream(file)); }
  static void change(const std::string& folder, const std::function<void(json&)>& edit) {
    json config = read(folder + "/config.json");
    edit(config);
    std::ofstream(folder + "/config.json") << config;
  }
  static std::int64_t length_of(const std::string& folder) {
    return read(folder + "/config.json").at("max_position_embeddings");
  }
};

TEST_F(HuggingFaceConfig, TheLengthOfAYarnRopeIsItsFactorTimesTheOriginal) {
  ModelShape shape = small_shape();
  shape.yarn_factor = 4, shape.original_context = 32768;
  EXPECT_EQ(length_of(write("m", shape)), 131072);
}

// The base's own length stays with its rope, and goes with another factor.
TEST_F(HuggingFaceConfig, AChangedRopeHasALengthOfItsOwn) {
  ModelShape shape = small_shape();
  shape.yarn_factor = 4, shape.original_context = 32768;
  const std::string base = write("base", shape);
  change(base, [](json& config) { config["max_position_embeddings"] = 100000; });
  EXPECT_EQ(length_of(write("same", shape, base)), 100000);
  shape.yarn_factor = 8;
  EXPECT_EQ(length_of(write("wider", shape, base)), 262144);
}

TEST_F(HuggingFaceConfig, WhatAFileDoesNotStateIsThatOfItsClass) {
  ModelShape shape = small_shape();
  shape.qkv_bias = false, shape.qk_norm = true;
  const std::string folder = write("m", shape);
  change(folder, [](json& config) { config.erase("head_dim"), config.erase("rms_norm_eps"); });
  EXPECT_EQ(read_huggingface_config(folder).head_dim, 128);
  EXPECT_EQ(read_huggingface_config(folder).rms_eps, 1e-6);
  change(folder, [](json& config) { config["model_type"] = "llama"; });
  EXPECT_EQ(read_huggingface_config(folder).head_dim, 16 / 4);
}

TEST_F(HuggingFaceConfig, FilesKeepToTheirLimitAndTheIndexTellsTheSum) {
  constexpr std::int64_t kLimit = 4000;
  const std::string folder = write("m", small_shape(), "", kLimit);
  std::int64_t files = 0, data = 0, most = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::uint64_t header = 0;
    std::ifstream(entry.path(), std::ios::binary).read(reinterpret_cast<char*>(&header), 8);
    const auto bytes = static_cast<std::int64_t>(fs::file_size(entry) - 8 - header);
    ++files, data += bytes, most = std::max(most, bytes);
  }
  EXPECT_GT(files, 1);
  EXPECT_LE(most, kLimit);
  EXPECT_GT(most, kLimit / 2);
  EXPECT_EQ(data, 4 * small_shape().parameters());
  const json index = read(folder + "/model.safetensors.index.json");
  EXPECT_EQ(index.at("metadata").at("total_size"), data);
}

}  // namespace
}  // namespace ballast
