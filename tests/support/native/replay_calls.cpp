// Repeats the calls of a file that native_calls.py wrote, on whatever processor this is compiled for, and compares what
// they leave in memory bit by bit. Ends with 1 at the first call that differs.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

struct Call {
  char name[32];
  int64_t num_regions, arguments[14];
};
struct Region {
  int64_t address, size;
  std::vector<char> before, after;
};

constexpr int64_t FIRST_ADDRESS = int64_t(1) << 36, ROOM = int64_t(1) << 30;

template <class T>
T read(std::ifstream& file) {
  T value;
  file.read(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

std::vector<Region> read_regions(std::ifstream& file, int64_t count) {
  std::vector<Region> regions(count);
  for (Region& region : regions) {
    region.address = read<int64_t>(file), region.size = read<int64_t>(file);
    region.before.resize(region.size), region.after.resize(region.size);
    file.read(region.before.data(), region.size), file.read(region.after.data(), region.size);
    if (region.address < FIRST_ADDRESS || region.address + region.size > FIRST_ADDRESS + ROOM) {
      std::printf("a region of %ld bytes at %lx is not in the room for them\n", long(region.size), long(region.address));
      std::exit(1);
    }
    std::memcpy(reinterpret_cast<void*>(region.address), region.before.data(), region.size);
  }
  return regions;
}

int64_t first_difference(const Region& region) {
  const char* is = reinterpret_cast<const char*>(region.address);
  for (int64_t i = 0; i < region.size; ++i)
    if (is[i] != region.after[i]) return i;
  return -1;
}

int main(int argc, char** argv) {
  if (argc != 3) return std::printf("usage: %s LIBRARY CALLS\n", argv[0]), 2;
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) return std::printf("%s\n", dlerror()), 2;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE;
  if (mmap(reinterpret_cast<void*>(FIRST_ADDRESS), ROOM, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED)
    return std::perror("mmap"), 2;
  std::ifstream file(argv[2], std::ios::binary);
  std::map<std::string, int> counts;
  for (int number = 0; file.peek() != EOF; ++number) {
    const Call call = read<Call>(file);
    const std::vector<Region> regions = read_regions(file, call.num_regions);
    using Function = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                              int64_t, int64_t, int64_t, int64_t);
    const Function function = reinterpret_cast<Function>(dlsym(library, call.name));
    if (!function) return std::printf("%s\n", dlerror()), 2;
    const int64_t* a = call.arguments;
    function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
             a[13]);
    for (const Region& region : regions)
      if (const int64_t at = first_difference(region); at >= 0) {
        std::printf("call %d, %s: byte %ld of %ld differs\n", number, call.name, long(at), long(region.size));
        return 1;
      }
    ++counts[call.name];
  }
  for (const auto& [name, count] : counts) std::printf("%s %d\n", name.c_str(), count);
}
