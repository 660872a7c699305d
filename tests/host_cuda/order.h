// Orders in which things happen that a GPU does in any order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace host_cuda {

enum class Order : int { FORWARD, REVERSED, SHUFFLED };

// The generator splitmix64: the same numbers wherever it runs.
class Random {
public:
    explicit Random(std::uint64_t seed) : state(seed) {}

    std::uint64_t operator()() {
        std::uint64_t bits = state += 0x9e3779b97f4a7c15u;
        bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
        bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
        return bits ^ (bits >> 31);
    }

private:
    std::uint64_t state;
};

template <class Iterator>
void arrange(Iterator begin, Iterator end, Order order, Random& random) {
    if (order == Order::REVERSED) std::reverse(begin, end);
    if (order != Order::SHUFFLED) return;
    for (auto left = end - begin; left > 1; --left) std::iter_swap(begin + left - 1, begin + random() % left);
}

}  // namespace host_cuda
