// Gated activations of [gate | up], 16 outputs at a time.
#pragma once
#include "tile.h"

namespace k3hal {

struct Gate {
    int situ;  // else SiLU, which has no betas
    float beta, linear_beta;

    inline v16f operator()(v16f gate, v16f up) const {
        const v16f open = sigmoid16(gate);
        if (!situ) return gate * open * up;
        return beta * tanh16(gate / beta) * open * (linear_beta * tanh16(up / linear_beta));
    }
};

}  // namespace k3hal
