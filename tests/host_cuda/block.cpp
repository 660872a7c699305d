#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks

#include "block.h"

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <exception>
#include <memory>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace host_cuda {
namespace {

constexpr size_t STACK = 128 * 1024;

// Where a flow of control goes on.
struct Context {
    jmp_buf registers;
};

// Leave for `to`, until somebody changes to `from`. Unlike swapcontext this makes no system call. Neither this nor start
// is inlined: no variable of theirs lives across setjmp's second return.
__attribute__((noinline)) void change(Context& from, Context& to) {
    if (_setjmp(from.registers) == 0) _longjmp(to.registers, 1);
}

__attribute__((noinline)) void start(Context& from, const ucontext_t& to) {
    if (_setjmp(from.registers) == 0) setcontext(&to);
}

enum class Wait { NOTHING, BLOCK, WARP, RETURNED };

struct Thread {
    Context context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool idle = false;  // at the head of live's loop
    int id = 0;
    uint3 index = {};

    Wait wait = Wait::NOTHING;
    const char* where = nullptr;  // the file of a __syncthreads
    int line = 0;
    std::uint64_t value = 0;
    int source = 0;
    std::uint64_t result = 0;
};

std::vector<std::unique_ptr<Thread>> pool;  // kept from block to block and from launch to launch
Context home;

struct Block {
    void (*work)(void*);
    void* call;
    Random* random;

    int threads = 0;
    Thread* current = nullptr;
    std::deque<Thread*> ready;  // first come, first served
    int arrived = 0;  // at the block's barrier
    const Thread* first_arrived = nullptr;
    int returned = 0;
    std::vector<int> turns;
    std::exception_ptr failure;
};

Block block;

template <class Triple>
std::string in_brackets(Triple t) {
    return "(" + std::to_string(t.x) + ", " + std::to_string(t.y) + ", " + std::to_string(t.z) + ")";
}

std::runtime_error divergence() { return error("Threads diverged: some wait for others that do not come"); }

void resume(Context& from, Thread* thread) {
    block.current = thread;
    threadIdx = thread->index;
    change(from, thread->context);
}

Thread* next_thread() {
    Thread* next = block.ready.front();
    block.ready.pop_front();
    return next;
}

// Give way to the next thread; without one, what the others wait for never comes.
void give_way(Thread& self) {
    if (block.ready.empty()) throw divergence();
    Thread* next = next_thread();
    if (next != &self) resume(self.context, next);
}

// Let those of `count` threads from `first` on run that have not returned.
void release(int first, int count) {
    auto end = block.turns.begin();
    for (int id = first; id < first + count; ++id) {
        if (pool[id]->wait != Wait::RETURNED) *end++ = id;
    }
    arrange(block.turns.begin(), end, *block.random);
    for (auto id = block.turns.begin(); id != end; ++id) {
        pool[*id]->wait = Wait::NOTHING;
        block.ready.push_back(pool[*id].get());
    }
}

void release_all() {
    block.arrived = 0;
    release(0, block.threads);
}

// If all lanes of the warp from thread `first` on are at a shuffle, hand out the results and let them run on. A thread
// that has returned is waited for by nobody.
void complete(int first) {
    const int lanes = std::min(32, block.threads - first);
    for (int lane = 0; lane < lanes; ++lane) {
        const Wait wait = pool[first + lane]->wait;
        if (wait == Wait::NOTHING) return;
        if (wait == Wait::BLOCK) throw divergence();
    }
    for (int lane = 0; lane < lanes; ++lane) {
        Thread& to = *pool[first + lane];
        if (to.wait == Wait::WARP && to.source < lanes && pool[first + to.source]->wait == Wait::WARP) {
            to.result = pool[first + to.source]->value;
        } else {
            std::memset(&to.result, UNWRITTEN, sizeof to.result);  // undefined on a GPU
        }
    }
    release(first, lanes);
}

void retire(Thread& self) {
    self.wait = Wait::RETURNED;
    ++block.returned;
    const int first = self.id / 32 * 32;
    for (int id = first; id < std::min(first + 32, block.threads); ++id) {
        if (pool[id]->wait == Wait::WARP) complete(first);
    }
}

// All that happens on a thread's stack: one turn of the loop for each block. It does not return.
void live() {
    Thread& self = *block.current;
    self.idle = true;
    change(self.context, home);
    for (;;) {
        self.idle = false;
        try {
            block.work(block.call);
            retire(self);
            if (block.returned < block.threads && block.ready.empty()) throw divergence();
        } catch (...) {
            block.failure = std::current_exception();
        }
        self.idle = true;
        if (block.failure || block.returned == block.threads) {
            change(self.context, home);
        } else {
            resume(self.context, next_thread());
        }
    }
}

// Begin a thread's life, until it changes to home. What was on its stack is gone, without destructors.
void bring_to_life(Thread& thread) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack.get();
    // Stacks that begin at one place of their pages would compete for a few lines of the cache.
    context.uc_stack.ss_size = STACK - thread.id % 64 * 64;
    context.uc_link = nullptr;
    makecontext(&context, live, 0);
    block.current = &thread;
    start(home, context);
}

}  // namespace

std::runtime_error error(const std::string& what) {
    return std::runtime_error(what + "; in block " + in_brackets(blockIdx) + " of a grid of " + in_brackets(gridDim));
}

void prepare_threads() {
    block.threads = blockDim.x * blockDim.y * blockDim.z;
    block.turns.resize(block.threads);
    while (int(pool.size()) < block.threads) {
        pool.push_back(std::make_unique<Thread>());
        pool.back()->id = int(pool.size()) - 1;
    }
    for (int id = 0; id < block.threads; ++id) pool[id]->index = unravel(id, blockDim);
}

void run_block(void (*work)(void*), void* call, Random& random) {
    for (int id = 0; id < block.threads; ++id) {
        Thread& thread = *pool[id];
        thread.wait = Wait::NOTHING;
        if (!thread.idle) bring_to_life(thread);  // it is new, or was left at a barrier by a block that failed
    }
    block.work = work;
    block.call = call;
    block.random = &random;
    block.ready = {};
    block.returned = 0;
    block.failure = nullptr;
    release_all();
    resume(home, next_thread());
    if (block.failure) std::rethrow_exception(block.failure);
}

void block_barrier(const char* file, int line) {
    Thread& self = *block.current;
    self.wait = Wait::BLOCK;
    self.where = file;
    self.line = line;
    if (block.arrived == 0) block.first_arrived = &self;
    const Thread& first = *block.first_arrived;
    if (line != first.line || (file != first.where && std::strcmp(file, first.where) != 0)) throw divergence();
    if (++block.arrived == block.threads) release_all();
    give_way(self);
}

std::uint64_t exchange(std::uint64_t value, int source) {
    Thread& self = *block.current;
    self.wait = Wait::WARP;
    self.value = value;
    self.source = source;
    complete(self.id / 32 * 32);
    give_way(self);
    return self.result;
}

}  // namespace host_cuda
