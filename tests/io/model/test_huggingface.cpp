// Safetensors and Hugging Face folders: exact round trips, any range, damaged files refused by
// name.
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "core/base/error.hpp"
#include "io/model/huggingface.hpp"
#include "io/model/safetensors.hpp"

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

  static ModelShape small() {
    ModelShape shape;
    shape.layers = 2, shape.hidden = 16, shape.intermediate = 24, shape.query_heads = 4,
    shape.kv_heads = 2, shape.head_dim = 4, shape.vocabulary = 40;
    shape.qkv_bias = true;
    return shape;
  }
  /// A value that bf16 holds exactly, the same wherever it is computed.
  static float value(std::size_t parameter, std::int64_t i) {
    return static_cast<float>((static_cast<std::int64_t>(parameter) * 31 + i * 7) % 255 - 127) / 64;
  }
  void write(const std::string& to, const std::string& dtype, std::int64_t shard_bytes) {
    write_huggingface(to, small(), parameter_table(small()), dtype, shard_bytes,
                      [](std::size_t p, std::int64_t begin, std::span<float> out) {
                        for (std::size_t i = 0; i < out.size(); ++i)
                          out[i] = value(p, begin + static_cast<std::int64_t>(i));
                      });
  }
  std::string dir;
};

TEST_F(HuggingFace, RoundTripIsExactInOneFileAndInSeveral) {
  const auto table = parameter_table(small());
  std::vector<float> expected;
  for (std::size_t p = 0; p < table.size(); ++p)
    for (std::int64_t i = 0; i < table[p].numel(); ++i) expected.push_back(value(p, i));
  for (const char* dtype : {"BF16", "F32"})
    for (std::int64_t shard : {std::int64_t{1} << 30, std::int64_t{1500}}) {
      const std::string to = dir + "/" + dtype + std::to_string(shard);
      write(to, dtype, shard);
      EXPECT_EQ(fs::exists(to + "/model.safetensors.index.json"), shard == 1500);
      const ModelShape shape = read_huggingface_config(to);
      EXPECT_EQ(shape.parameters(), small().parameters());
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
      Tensor out = Tensor::empty({small().parameters()}, DType::f32);
      read_huggingface_weights(dir + "/m", parameter_table(small()), 0, small().parameters(), out);
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

}  // namespace
}  // namespace ballast
