// Batched QR without Householder, and with it where that fails: three drivers over one sequence of launches. Which
// matrices a launch works on is decided by their state on the device, so that nothing is ever read on the host.
#pragma once

#include <cmath>

#include "cholesky.cuh"
#include "householder.cuh"
#include "interface.h"
#include "scaling.cuh"

namespace prokl {

constexpr int PASSES = 4;        // of Cholesky QR; two are the rule, a condition number near 1/eps takes three
constexpr int SPLIT_ROWS = 256;  // of a Gram matrix of one block; one of several blocks has as many times as many
constexpr int MOST_ROWS = 4096;  // the error of a sum grows with the square root of its length

// Parts of one allocation, each aligned for any type; measures when there is none.
class Workspace {
  public:
    explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}
    template <class P>
    P* take(size_t count) {
        P* part = base_ == nullptr ? nullptr : reinterpret_cast<P*>(base_ + bytes_);
        bytes_ += (count * sizeof(P) + 255) / 256 * 256;
        return part;
    }
    size_t bytes() const { return bytes_; }

  private:
    char* base_;
    size_t bytes_ = 0;
};

template <class T>
class Solver {
  public:
    // state (B) and orthogonality (B) are outputs; `workspace` has at least bytes(size).
    Solver(Size size, void* workspace, int* state, float* orthogonality, cudaStream_t stream)
        : size_(size), state_(state), orthogonality_(orthogonality), stream_(stream) {
        lay_out(workspace);
    }

    static size_t bytes(Size size) {
        Solver solver(size, nullptr, nullptr, nullptr, nullptr);
        return solver.bytes_;
    }

    // Q of qr(A).
    void qr(Batch<const T> A, Batch<T> Q) {
        begin(A, false);
        prepare(A, {}, Q, undecided());
        passes(Q, false);
        fall_back(A, {}, Q);
        conclude({}, Q);
    }

    // Q of qr(V) for V = Phi U, Phi positive semi-definite and U orthonormal, given K = U^T V: the columns of
    // V chol(K)^-T are orthogonal already as far as U spans an invariant subspace. Where rounding has swallowed a
    // pivot, Phi + delta I takes Phi's place; where V is not finite, Q is U.
    void tracking_qr(Batch<const T> V, Batch<const T> K, Batch<const T> U, Batch<T> Q) {
        begin(V, true);
        factor_or_shift<false>(K, N_);
        prepare(V, U, Q, undecided());
        apply<T>(Q, Q, F_, size_.n, size_.k, size_.batch, undecided(), stream_);
        passes(Q, false);
        fall_back(V, U, Q);
        conclude(U, Q);
    }

    // Q of qr(S) for a symmetric positive semi-definite S = C C^T: that of qr(C), whose condition is the root of S's.
    // Where rounding has swallowed a pivot S + delta I takes S's place.
    void semidefinite_qr(Batch<const T> S, Batch<T> Q) {
        begin(S, true);
        factor_or_shift<true>(S, Q);
        passes(Q, true);
        fall_back(S, {}, Q);
        conclude({}, Q);
    }

  private:
    static constexpr T EPS = std::numeric_limits<T>::epsilon();

    // Relative to its column's squared length: below that a pivot is rounding noise, which adds up over k columns like
    // a random walk. As a shift of V it stays within 4 k eps ||V||_F.
    T floor() const { return T(4) * std::sqrt(T(size_.k)) * EPS; }
    // In a pass a column counts as lost well above the noise: W is multiplied by an explicit inverse, so that what
    // rounding does to A goes with the inverse's norm, at most about a hundred then. The next pass finds a shorter
    // column, but one with its digits. Largest backward error of 2496 singular or nearly singular matrices of 20 and 60
    // columns, half of them in float64: 4.5 k eps ||A||_F, where raising at the noise gave up to 6000.
    Pivots<T> pass_pivots() const {
        const T lost = std::max(T(1e-4), T(30) * floor());
        return {lost, T(3) * lost};
    }
    // ||Q^T Q - I||_F with which a matrix is done: what rounding leaves of it after a pass, with room for the sum's own.
    T reached() const { return std::min(T(4) * T(size_.k + 8), T(16) * T(size_.k)) * EPS; }
    T acceptable() const { return T(100) * T(size_.k) * EPS; }

    Active undecided() const { return {state_, DONE, 0}; }
    int blocks() const { return lower_blocks(ceil_div(size_.k, BLOCK<T>)); }
    // Not chosen by the batch: a matrix gives the same bits whatever is beside it.
    int split_rows() const { return std::min(MOST_ROWS, SPLIT_ROWS * blocks()); }
    int splits() const { return ceil_div(size_.n, split_rows()); }

    void lay_out(void* base) {
        Workspace workspace(base);
        const size_t B = size_.batch, k = size_.k;
        exponents_ = workspace.template take<int>(B * k);
        scale_ = workspace.template take<T>(B * k);
        shift_ = workspace.template take<T>(B);
        diagonal_ = workspace.template take<T>(B * k);
        deviation_ = workspace.template take<T>(B * blocks());
        Workspace fallback = workspace;  // in the same place: the passes are over when it begins
        triangles_ = fallback.template take<T>(B * tsqr_workspace<T>(size_.n, size_.k));
        N_ = {workspace.template take<T>(B * k * k), Index(k) * size_.k, size_.k};
        F_ = {workspace.template take<T>(B * k * k), Index(k) * size_.k, size_.k};
        partial_ = workspace.template take<T>(splits() == 1 ? 0 : B * splits() * blocks() * BLOCK<T> * BLOCK<T>);
        bytes_ = std::max(workspace.bytes(), fallback.bytes());
    }

    void begin(Batch<const T> A, bool uniform) {
        const auto [batch, n, k] = size_;
        check(cudaMemsetAsync(state_, 0, batch * sizeof(int), stream_));
        check(cudaMemsetAsync(exponents_, 0x80, size_t(batch) * k * sizeof(int), stream_));
        check(cudaMemsetAsync(shift_, 0, batch * sizeof(T), stream_));
        launch(exponents_kernel<T>, dim3(ceil_div(k, 32), ceil_div(n, ROWS), batch), THREADS, 0, stream_, A, n, k,
               std::numeric_limits<T>::max(), exponents_);
        launch(scale_kernel<T>, dim3(batch), THREADS, sizeof(int), stream_, exponents_, scale_, k, uniform,
               std::numeric_limits<T>::max_exponent - 2, state_);
    }

    void load(Batch<const T> K, Batch<T> N, Active active) {
        launch(load_kernel<T>, dim3(ceil_div(size_.k, ROWS), 1, size_.batch), THREADS, 0, stream_, K, N, diagonal_,
               size_.k, scale_, shift_, active);
    }

    // N = K = C C^T and, without KEEP, F_ = C^-T; of K + delta I where a pivot had to be raised.
    template <bool KEEP>
    void factor_or_shift(Batch<const T> K, Batch<T> N) {
        const auto [batch, n, k] = size_;
        const Active lost{state_, DONE | RAISED, RAISED}, shifted{state_, DONE | SHIFTED, SHIFTED};
        const Pivots<T> pivots{floor(), floor()};
        load(K, N, undecided());
        factor<T, KEEP>(N, F_, diagonal_, k, pivots, !KEEP, batch, state_, undecided(), stream_);
        launch(shift_kernel<T>, dim3(batch), THREADS, sizeof(T) * WARPS, stream_, diagonal_, k, floor(), shift_, state_,
               lost);
        load(K, N, shifted);
        factor<T, KEEP>(N, F_, diagonal_, k, pivots, !KEEP, batch, state_, shifted, stream_);
    }

    void prepare(Batch<const T> A, Batch<const T> U, Batch<T> Q, Active active) {
        launch(prepare_kernel<T>, dim3(ceil_div(size_.n, ROWS), 1, size_.batch), THREADS, 0, stream_, A, U, Q, size_.n,
               size_.k, scale_, shift_, active);
    }

    void form_gram(Batch<T> W, bool lower, Active active) {
        const auto [batch, n, k] = size_;
        const Gram<T> gram{N_, diagonal_, deviation_};
        launch(lower ? gram_kernel<T, true> : gram_kernel<T, false>, dim3(blocks(), splits(), batch), THREADS,
               PRODUCT_SHARED<T>, stream_, W, gram, partial_, n, k, split_rows(), active);
        if (splits() > 1)
            launch(sum_splits_kernel<T>, dim3(blocks(), 1, batch), THREADS, PRODUCT_SHARED<T>, stream_, partial_, splits(),
                   gram, k, active);
    }

    void judge(T bound, int otherwise, Active active) {
        launch(judge_kernel<T>, dim3(size_.batch), THREADS, sizeof(T) * WARPS, stream_, deviation_, blocks(), bound,
               otherwise, orthogonality_, state_, active);
    }

    // Cholesky QR of W in place until its columns are orthonormal: W <- W chol(W^T W)^-T. Each pass begins with the
    // Gram matrix that says whether it is needed, and the last is followed by one.
    void passes(Batch<T> W, bool lower) {
        const auto [batch, n, k] = size_;
        for (int pass = 0; pass < PASSES; ++pass) {
            form_gram(W, lower && pass == 0, undecided());
            judge(reached(), PASS, undecided());
            factor<T, false>(N_, F_, diagonal_, k, pass_pivots(), true, batch, state_, undecided(), stream_);
            apply<T>(W, W, F_, n, k, batch, undecided(), stream_);
        }
        form_gram(W, false, undecided());
        judge(acceptable(), HOUSEHOLDER, undecided());
    }

    void fall_back(Batch<const T> A, Batch<const T> U, Batch<T> Q) {
        const Active failed{state_, DONE | HOUSEHOLDER, HOUSEHOLDER};
        prepare(A, U, Q, failed);
        tsqr<T>(Q, size_.n, size_.k, triangles_, size_.batch, failed, stream_);
        form_gram(Q, false, failed);
        judge(std::numeric_limits<T>::max(), NONFINITE | DONE, failed);  // K may not be finite where V is
    }

    void conclude(Batch<const T> U, Batch<T> Q) {
        launch(conclude_kernel<T>, dim3(ceil_div(size_.n, ROWS), 1, size_.batch), THREADS, 0, stream_, U, Q, size_.n,
               size_.k, std::numeric_limits<T>::quiet_NaN(), orthogonality_, Active{state_, NONFINITE, NONFINITE});
    }

    Size size_;
    int* state_;
    float* orthogonality_;
    cudaStream_t stream_;
    int* exponents_;
    T *scale_, *shift_, *diagonal_, *deviation_, *partial_, *triangles_;
    Batch<T> N_, F_;
    size_t bytes_;
};

}  // namespace prokl
