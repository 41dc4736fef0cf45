//! The whole service with a worker in the same process: a real channel, a real ring, a real store.

mod attach;
mod bytes;
mod catalog;
mod conversations;
mod describe;
mod durable;
mod fake;
mod full_disk;
mod hostile;
mod limits;
mod mixed;
mod portable;
mod power;
mod pressure;
mod ranks;
mod restore;
mod save;
mod scrub;
mod sick_disk;
mod simulation;
mod small_disk;
mod streams;
mod world;
