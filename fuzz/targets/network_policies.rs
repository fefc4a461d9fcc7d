//! Any policy over any floor, compiled: never a floor address, never what the kernel refuses.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pepo_fuzz::network_policies(bytes));

libfuzzer_sys::fuzz_mutator!(|input: &mut [u8], size: usize, most: usize, chance: u32| {
    pepo_fuzz::mutate(pepo_fuzz::NETWORK_POLICIES, input, size, most, chance)
});
